"""Wrong ways to generate, each the right one but for one fault."""

import math
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from perf_lab.decode import Decode, Slots
from perf_lab.generate import generate, generation
from perf_lab.sampling import penalized, pick, seen_ids

from . import mutant

LAW = "test_generate::test_sampled_tokens_are_those_of_the_law"
PADDED = "test_generate::test_a_left_padded_row_is_as_if_alone"
EOS = "test_generate::test_a_row_ends_with_its_first_eos"
GIVEN = "test_generate::test_a_cache_that_is_given_is_used_and_grows_by_what_is_new"


class Through:
    """A model seen through a change of each call's arguments or logits; it has no step, which goes around."""

    def __init__(self, model: Any, change: Any) -> None:
        self.model, self.change = model, change

    def __getattr__(self, name: str) -> Any:
        if name == "step":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __call__(self, tokens: Tensor, cache: Any, **how: Any) -> Tensor:
        return self.change(self.model, tokens, cache, **how)


@mutant(generation, killed_by="test_generate::test_a_cache_changes_no_token")
def last_token_twice(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """With a cache, each step gives the model the token before the last."""

    def change(model: Any, tokens: Tensor, cache: Any, **rest: Any) -> Tensor:
        if cache is not None and cache.length >= prompt.shape[1]:
            change.last, tokens = tokens, change.last
        else:
            change.last = tokens[:, -1:]
        return model(tokens, cache, **rest)

    return generate(Through(model, change), prompt, new, **how)


@mutant(generation, killed_by="test_generate::test_greedy_tokens_have_the_largest_logits")
def second_best(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """The token with the second largest logit."""

    def change(model: Any, tokens: Tensor, cache: Any, **rest: Any) -> Tensor:
        logits = model(tokens, cache, **rest)
        return logits.scatter(-1, logits.argmax(-1, keepdim=True), -math.inf)

    return generate(Through(model, change), prompt, new, **how)


@mutant(generation, killed_by="test_generate::test_greedy_tokens_have_the_largest_logits")
def position_before_the_last(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """The first step takes the logits of the prompt's first token."""

    def change(model: Any, tokens: Tensor, cache: Any, *, last_only: bool, **rest: Any) -> Tensor:
        logits = model(tokens, cache, **rest)
        return logits[:, :1] if tokens.shape[1] == prompt.shape[1] else logits

    return generate(Through(model, change), prompt, new, **how)


@mutant(generation, killed_by=LAW)
def temperature_ignored(
    model: Any, prompt: Tensor, new: int, *, temperature: float = 0.0, **how: Any
) -> Tensor:
    """Every temperature but 0 is 1."""
    return generate(model, prompt, new, temperature=float(temperature > 0), **how)


@mutant(generation, killed_by=LAW)
def temperature_multiplies(
    model: Any, prompt: Tensor, new: int, *, temperature: float = 0.0, **how: Any
) -> Tensor:
    """The logits are multiplied by the temperature."""
    return generate(model, prompt, new, temperature=1 / temperature if temperature else 0.0, **how)


@mutant(generation, killed_by=LAW)
def top_k_ignored(model: Any, prompt: Tensor, new: int, *, top_k: int | None = None, **how: Any) -> Tensor:
    """All tokens may be drawn."""
    return generate(model, prompt, new, **how)


@mutant(generation, killed_by=LAW)
def top_p_ignored(model: Any, prompt: Tensor, new: int, *, top_p: float | None = None, **how: Any) -> Tensor:
    """The mass that may be drawn is all of it."""
    return generate(model, prompt, new, **how)


@mutant(generation, killed_by=LAW)
def top_p_is_min_p(
    model: Any, prompt: Tensor, new: int, *, top_p: Any = None, min_p: Any = None, **how: Any
) -> Tensor:
    """The two are taken for each other."""
    return generate(model, prompt, new, top_p=min_p, min_p=top_p, **how)


@mutant(generation, killed_by=LAW)
def penalty_sees_the_prompt_alone(
    model: Any, prompt: Tensor, new: int, *, repetition_penalty: float | None = None, **how: Any
) -> Tensor:
    """The tokens that were generated are not penalized."""

    def change(model: Any, tokens: Tensor, cache: Any, **rest: Any) -> Tensor:
        logits = model(tokens, cache, **rest)
        return penalized(logits, repetition_penalty, seen_ids(prompt, logits.shape[-1])[:, None])

    return generate(Through(model, change), prompt, new, **how)


@mutant(generation, killed_by="test_generate::test_a_penalty_counts_for_greedy_too_and_sees_no_padding")
def penalty_sees_padding(
    model: Any,
    prompt: Tensor,
    new: int,
    *,
    lengths: Any = None,
    repetition_penalty: float | None = None,
    **how: Any,
) -> Tensor:
    """The ids that pad a row are penalized."""
    with mock.patch("perf_lab.sampling.seen_ids", lambda tokens, v, pads=None: seen_ids(tokens, v)):
        return generate(model, prompt, new, lengths=lengths, repetition_penalty=repetition_penalty, **how)


@mutant(generation, killed_by="test_generate::test_a_penalty_counts_for_greedy_too_and_sees_no_padding")
def penalty_only_for_samples(
    model: Any,
    prompt: Tensor,
    new: int,
    *,
    temperature: float = 0.0,
    repetition_penalty: float | None = None,
    **how: Any,
) -> Tensor:
    """Greedy decoding pays no penalty."""
    penalty = repetition_penalty if temperature else None
    return generate(model, prompt, new, temperature=temperature, repetition_penalty=penalty, **how)


@mutant(generation, killed_by=LAW)
def one_number_for_all_rows(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """All rows use the first one's random number."""
    with mock.patch("perf_lab.sampling.pick", lambda p, uniform: pick(p, uniform[:1].expand_as(uniform))):
        return generate(model, prompt, new, **how)


@mutant(generation, killed_by=LAW)
def shifted_by_one(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """The token before the one in whose share the number lies."""
    with mock.patch("perf_lab.sampling.pick", lambda p, uniform: (pick(p, uniform) - 1).clamp(min=0)):
        return generate(model, prompt, new, **how)


@mutant(generation, killed_by=PADDED)
def one_position_vector(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """All rows have the positions of the longest."""

    def change(model: Any, tokens: Tensor, cache: Any, **rest: Any) -> Tensor:
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        return model(tokens, cache, positions=positions, **rest)

    return generate(Through(model, change), prompt, new, **how)


@mutant(generation, killed_by=PADDED)
def padding_seen(model: Any, prompt: Tensor, new: int, *, lengths: Any = None, **how: Any) -> Tensor:
    """Padding is part of the prompt."""
    return generate(model, prompt, new, **how)


@mutant(generation, killed_by=PADDED)
def padded_on_the_right(model: Any, prompt: Tensor, new: int, *, lengths: Any = None, **how: Any) -> Tensor:
    """Each row's prompt is taken to be its first tokens."""
    if lengths is not None:
        prompt = torch.stack([row.roll(-n) for row, n in zip(prompt, lengths, strict=True)])
    return generate(model, prompt, new, lengths=lengths, **how)


@mutant(generation, killed_by=EOS)
def eos_ignored(model: Any, prompt: Tensor, new: int, *, eos: int | None = None, **how: Any) -> Tensor:
    """Nothing ends before the budget."""
    return generate(model, prompt, new, **how)


@mutant(generation, killed_by=EOS)
def first_row_ends_all(model: Any, prompt: Tensor, new: int, *, eos: int | None = None, **how: Any) -> Tensor:
    """The first eos of any row ends all rows."""
    result = generate(model, prompt, new, eos=eos, **how)
    ends = [] if eos is None else (result[:, prompt.shape[1] :] == eos).any(0).nonzero().flatten().tolist()
    return result[:, : prompt.shape[1] + ends[0] + 1] if ends else result


@mutant(generation, killed_by=EOS)
def ended_rows_go_on(model: Any, prompt: Tensor, new: int, *, eos: int | None = None, **how: Any) -> Tensor:
    """A row that has ended goes on until all have."""
    columns = generate(model, prompt, new, eos=eos, **how).shape[1]
    if how.get("generator") is not None:
        how["generator"].manual_seed(how["generator"].initial_seed())
    return generate(model, prompt, new, **how)[:, :columns]


@mutant(generation, killed_by=EOS)
def eos_cut_off(model: Any, prompt: Tensor, new: int, *, eos: int | None = None, **how: Any) -> Tensor:
    """The last row's eos is left out."""
    result = generate(model, prompt, new, eos=eos, **how)
    return result[:, :-1] if eos is not None and bool((result[:, -1] == eos).all()) else result


@mutant(generation, killed_by=EOS)
def eos_of_the_prompt_counts(
    model: Any, prompt: Tensor, new: int, *, eos: int | None = None, **how: Any
) -> Tensor:
    """An eos in the prompt ends the row."""
    result = generate(model, prompt, new, eos=eos, **how)
    if eos is not None:
        result[:, prompt.shape[1] :].masked_fill_((prompt == eos).any(1, keepdim=True), eos)
    return result


@mutant(generation, killed_by="test_generate::test_the_result_is_the_prompt_and_the_new_tokens")
def one_token_too_many(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """The budget counts from 0 to max_new_tokens, both."""
    return generate(model, prompt, new + 1, **how)


@mutant(generation, killed_by="test_generate::test_the_result_is_the_prompt_and_the_new_tokens")
def new_tokens_only(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """The prompt is left out of the result."""
    return generate(model, prompt, new, **how)[:, prompt.shape[1] :]


@mutant(generation, killed_by=GIVEN)
def given_cache_filled_again(
    model: Any, prompt: Tensor, new: int, *, cache: Any = True, **how: Any
) -> Tensor:
    """The whole prompt is put behind what a given cache holds already."""
    if isinstance(cache, bool) or not cache.length or cache.length + prompt.shape[1] + new > cache.capacity:
        return generate(model, prompt, new, cache=cache, **how)
    both = torch.cat((prompt[:, : cache.length], prompt), 1)
    return generate(model, both, new, cache=cache, **how)[:, both.shape[1] - prompt.shape[1] :]


@mutant(generation, killed_by=GIVEN)
def last_token_in_the_cache(model: Any, prompt: Tensor, new: int, *, cache: Any = True, **how: Any) -> Tensor:
    """The cache is left with the last token too."""
    result = generate(model, prompt, new, cache=cache, **how)
    if not isinstance(cache, bool) and new:
        model(result[:, -1:], cache)
    return result


@mutant(generation, killed_by="test_generate::test_a_temperature_near_zero_is_greedy")
def threshold_at_zero(
    model: Any, prompt: Tensor, new: int, *, temperature: float = 0.0, **how: Any
) -> Tensor:
    """Only the temperature 0 itself is greedy: with the others 0 / temperature is NaN in the end."""

    def law(logits: Tensor, temperature: float, *rest: Any) -> Tensor:
        z = (logits.float() - logits.float().amax(-1, keepdim=True)) / torch.tensor(
            temperature, dtype=torch.float32
        )
        return torch.softmax(z, -1)

    with (
        mock.patch("perf_lab.sampling.GREEDY_BELOW", 5e-324),
        mock.patch("perf_lab.sampling.probabilities", law),
    ):
        return generate(model, prompt, new, temperature=temperature, **how)


@mutant(generation, killed_by="test_generate::test_the_same_seed_gives_the_same_tokens_and_another_others")
def generator_ignored(model: Any, prompt: Tensor, new: int, *, generator: Any = None, **how: Any) -> Tensor:
    """Every call draws the same numbers."""
    return generate(model, prompt, new, generator=torch.Generator().manual_seed(0), **how)


@mutant(generation, killed_by="test_generate::test_a_refused_call_leaves_the_cache_as_it_was")
def eos_unchecked(model: Any, prompt: Tensor, max_new_tokens: int, **how: Any) -> Tensor:
    """Any eos is taken; an impossible one never comes."""
    possible = how.get("eos") in range(model.config.vocab_size)
    return generate(model, prompt, max_new_tokens, **how | ({} if possible else {"eos": None}))


@mutant(generation, killed_by="test_generate::test_the_last_position_can_be_used")
def room_for_the_last_token(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """The last token, which the model never sees, must fit in max_length too."""
    if prompt.shape[1] + new > model.config.max_length:
        raise ValueError(f"max_new_tokens: got {new}, accepted are fewer")
    return generate(model, prompt, new, **how)


class StaleLength(Slots):
    """The length that each layer sees is that of the step before."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        self.seen = self.at.expand(len(q))
        return super().attend(layer, q, k, v, **how)


class WindowForgotten(Slots):
    """The step sees all tokens, whatever the window."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return super().attend(layer, q, k, v, **{**how, "window": None})


def through_slots(fault: type[Slots]) -> Any:
    def wrong(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
        plain = mock.patch("perf_lab.model.transformer.best", return_value="plain")  # which calls attend
        with mock.patch("perf_lab.decode.Slots", fault), plain:
            return generate(model, prompt, new, **{**how, "graph": True})

    wrong.__name__, wrong.__doc__ = fault.__name__, fault.__doc__
    return wrong


stale_length = mutant(generation, killed_by="test_generate::test_greedy_tokens_have_the_largest_logits")(
    through_slots(StaleLength)
)
window_forgotten = mutant(generation, killed_by="test_generate::test_a_cache_changes_no_token")(
    through_slots(WindowForgotten)
)


def through_decode(**change: Any) -> Any:
    """The step with one of its attributes or methods changed."""

    def wrong(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
        with mock.patch.multiple(Decode, **change):
            return generate(model, prompt, new, **{**how, "graph": True})

    return wrong


@mutant(generation, killed_by=GIVEN)
def steps_not_kept(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """The cache does not learn of the tokens that the steps computed."""
    return through_decode(keep=lambda self: None)(model, prompt, new, **how)


@mutant(generation, killed_by=GIVEN)
def kept_step_begins_one_token_early(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """A step that is used again computes the prompt's last token once more, over its first."""
    begin = Decode.begin

    def early(self: Decode, held: int, step: int, ended: Tensor) -> Tensor:
        begun, self.begun = getattr(self, "begun", False), True
        return begin(self, max(0, held - 1) if begun else held, step, ended)

    return through_decode(begin=early)(model, prompt, new, **how)


@mutant(generation, killed_by=LAW)
def one_number_for_all_steps(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """The recorded step draws the first step's number again and again."""
    advance = Decode._advance

    def first_again(self: Decode) -> None:
        self.step.zero_()
        advance(self)

    return through_decode(_advance=first_again)(model, prompt, new, **how)


@mutant(generation, killed_by=PADDED)
def steps_count_the_padding(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """The recorded step gives every row the position of the longest; what it sees is right."""
    advance = Decode._advance

    def unpadded(self: Decode) -> None:
        with mock.patch.object(self, "pads", None):
            advance(self)

    return through_decode(_advance=unpadded)(model, prompt, new, **how)


@mutant(generation, killed_by=PADDED)
def steps_see_the_padding(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """The recorded step sees the padding; its positions are right."""
    advance = Decode._advance

    def unmasked(self: Decode) -> None:
        with mock.patch.object(self, "mask", None):
            advance(self)

    return through_decode(_advance=unmasked)(model, prompt, new, **how)


@mutant(generation, killed_by=EOS)
def steps_go_on_after_eos(model: Any, prompt: Tensor, new: int, **how: Any) -> Tensor:
    """A row that ended within the recorded steps goes on."""
    advance = Decode._advance

    def endless(self: Decode) -> None:
        ended = self.ended.clone()
        advance(self)
        self.tokens[:, self.slots.at] = torch.where(
            ended[:, None], torch.zeros_like(self.tokens[:, :1]), self.tokens[:, self.slots.at]
        )

    return through_decode(_advance=endless)(model, prompt, new, **how)
