"""What drafts and batches must never get wrong: each row gets what it gets alone, whoever guesses."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perf_lab.generate import generate
from perf_lab.kv_cache import kv_cache
from perf_lab.model import ModelConfig, Transformer
from perf_lab.pytest_plugin import implementations, on_devices
from perf_lab.sampling import Sampling
from perf_lab.speculative import (
    ModelDraft,
    PromptLookup,
    Proposal,
    first_layers,
    prompt_lookup,
    quantized_copy,
    speculative,
    speculative_generate,
)

from .test_speculative import assert_equal, assert_tokens, exact

VOCAB = 5
seeds = st.integers(0, 20)
gammas = st.integers(1, 5)
lengths_of_rows = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@functools.cache
def model(
    device: str, seed: int, layers: int = 2, positions: str = "rotary", vocab: int = VOCAB
) -> Transformer:
    config = ModelConfig(
        vocab_size=vocab, layers=layers, width=8, heads=2, kv_heads=1, positions=positions, max_length=64
    )
    return Transformer.seeded(config, seed, exact(device), device).requires_grad_(False)


def prompts(device: str, seed: int, rows: int, length: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (rows, length), generator=g).to(device)


class RowByRow:
    """A draft that is right in each row as often as its list says: the truth, shifted where it is wrong."""

    def __init__(self, truth: Tensor, wrong: list[set[int]], given: int) -> None:
        marks = torch.zeros_like(truth)
        for row, places in enumerate(wrong):
            for place in places:
                if given + place < truth.shape[1]:
                    marks[row, given + place] = 1
        self.script = torch.nn.functional.pad((truth + marks) % VOCAB, (0, 9))

    def start(self, *ask: Any) -> None:
        pass

    def propose(self, committed: Tensor, k: int, lengths: Any = None, uniform: Any = None) -> Tensor:
        lengths = lengths or [committed.shape[1]] * len(committed)
        return torch.stack([self.script[row, n : n + k] for row, n in enumerate(lengths)])

    def rewind(self, length: int) -> None:
        pass


mistakes = st.lists(st.sets(st.integers(0, 13)), min_size=4, max_size=4)


@implementations(speculative)
@given(
    seed=seeds, rows=st.integers(1, 4), wrong=mistakes, gamma=gammas, new=st.integers(0, 14), data=st.data()
)
def test_each_row_of_a_batch_gets_what_it_gets_alone(device, impl, seed, rows, wrong, gamma, new, data):
    target, prompt = model(device, seed), prompts(device, seed, rows, 4)
    truth = generate(target, prompt, new, graph=False)
    eos = data.draw(st.none() | st.integers(0, VOCAB - 1), label="eos")
    result = impl(target, RowByRow(truth, wrong[:rows], 4), prompt, new, gamma=gamma, eos=eos)
    case = f"{seed=} {wrong[:rows]=} {gamma=} {new=} {eos=}"
    assert_tokens(result.tokens, generate(target, prompt, new, eos=eos, graph=False), case)
    for row in range(rows):
        alone = generate(target, prompt[row : row + 1], new, eos=eos, graph=False).shape[1] - 4
        emitted = sum(r.emitted for r in result.rounds if r.row == row)
        assert_equal(f"number of tokens emitted in row {row}", emitted, alone, case)


@implementations(speculative)
@given(
    seed=seeds,
    lengths=lengths_of_rows,
    draft_seed=seeds,
    layers=st.integers(1, 2),
    gamma=gammas,
    new=st.integers(0, 12),
)
def test_rows_of_unequal_length_get_what_they_get_alone(
    device, impl, seed, lengths, draft_seed, layers, gamma, new
):
    target, draft = model(device, seed), model(device, draft_seed, layers)
    prompt = prompts(device, seed, len(lengths), max(lengths))
    together = impl(target, draft, prompt, new, gamma=gamma, lengths=lengths).tokens
    for row, length in enumerate(lengths):
        alone = generate(target, prompt[row : row + 1, -length:], new, graph=False)
        assert_tokens(together[row : row + 1, -length - new :], alone, f"{seed=} {lengths=} {gamma=} {row=}")


@implementations(speculative)
@given(seed=seeds, wrong=mistakes, gamma=gammas, new=st.integers(1, 14))
def test_a_forward_computes_a_bounded_number_of_tokens(device, impl, seed, wrong, gamma, new):
    target, prompt, widths = model(device, seed), prompts(device, seed, 4, 1), []

    class Watched:
        config, new_cache = target.config, target.new_cache

        def __call__(self, tokens: Tensor, *args: Any, **how: Any) -> Tensor:
            widths.append(tokens.shape[1])
            return target(tokens, *args, **how)

    truth = generate(target, prompt, new, graph=False)
    impl(Watched(), RowByRow(truth, wrong, 1), prompt, new, gamma=gamma)
    assert max(widths) <= 2 * gamma + 1
    assert len(widths) <= new  # in each the slowest row gains a token


@implementations(speculative)
@given(seed=seeds, lengths=lengths_of_rows, gamma=gammas, new=st.integers(1, 8))
def test_a_long_prompt_is_read_without_its_logits(device, impl, seed, lengths, gamma, new):
    target, asked = model(device, seed), []
    prompt = prompts(device, seed, len(lengths), max(lengths))

    class Watched:
        config, new_cache = target.config, target.new_cache

        def __call__(self, tokens: Tensor, *args: Any, **how: Any) -> Tensor:
            logits = target(tokens, *args, **how)
            asked.append(logits.shape[1])
            return logits

    with mock.patch("perf_lab.speculative.draft_verify.MOST_LOGITS", 0):
        result = impl(Watched(), PromptLookup(), prompt, new, gamma=gamma, lengths=lengths)
    should_be = generate(target, prompt, new, lengths=lengths, graph=False)
    assert_tokens(result.tokens[:, -new:], should_be[:, -new:], f"{seed=} {lengths=} {gamma=}")
    assert max(asked) <= 2 * gamma + 1


@implementations(kv_cache)
@given(seed=seeds, draft_seed=seeds, rows=st.integers(1, 3), gamma=gammas, new=st.integers(1, 9))
def test_any_cache_of_the_interface_serves(device, impl, seed, draft_seed, rows, gamma, new):
    class Over:
        """A model whose cache is of this kind."""

        def __init__(self, net: Transformer) -> None:
            self.net, self.config = net, net.config

        def new_cache(self, batch: int, capacity: int) -> Any:
            like = {"dtype": exact(device), "device": device}
            sizes = {name: getattr(self.config, name) for name in ("layers", "kv_heads", "head_dim")}
            return impl.fn(batch=batch, capacity=capacity, **sizes, **like)

        def __call__(self, *args: Any, **how: Any) -> Tensor:
            return self.net(*args, **how)

    target, draft, prompt = (
        Over(model(device, seed)),
        model(device, draft_seed),
        prompts(device, seed, rows, 4),
    )
    result = speculative_generate(target, Over(draft), prompt, new, gamma=gamma)
    should_be = generate(target, prompt, new, cache=target.new_cache(rows, 4 + new), graph=False)
    assert_tokens(result.tokens, should_be, f"{seed=} {draft_seed=} {gamma=}")


@implementations(speculative)
@given(seed=seeds, gamma=gammas, lengths=lengths_of_rows)
def test_the_target_as_a_draft_of_unequal_rows_is_always_accepted(device, impl, seed, gamma, lengths):
    target = model(device, seed)
    prompt = prompts(device, seed, len(lengths), max(lengths))
    result = impl(target, target, prompt, 10, gamma=gamma, lengths=lengths)
    assert result.acceptance == 1.0
    assert result.target_forwards == -(-10 // (gamma + 1))


@implementations(speculative)
@given(
    seed=seeds,
    rows=st.integers(1, 3),
    draft_seed=seeds,
    gamma=gammas,
    penalty=st.sampled_from([0.5, 1.5, 5.0]),
)
def test_a_repetition_penalty_is_the_targets(device, impl, seed, rows, draft_seed, gamma, penalty):
    target, prompt = model(device, seed), prompts(device, seed, rows, 3)
    how = Sampling(repetition_penalty=penalty)
    result = impl(target, model(device, draft_seed, 1), prompt, 9, gamma=gamma, sampling=how)
    should_be = generate(target, prompt, 9, repetition_penalty=penalty, graph=False)
    assert_tokens(result.tokens, should_be, f"{seed=} {gamma=} {penalty=}")


@implementations(prompt_lookup)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    longest=st.integers(1, 4),
    k=st.integers(1, 5),
    splits=st.lists(st.integers(1, 5), max_size=5),
)
def test_a_look_up_proposes_what_followed_the_longest_latest_match(device, impl, text, longest, k, splits):
    draft, known = impl(longest), 1
    draft.start(3, 30)
    for step in splits:  # the rounds before: what it learned then does not change what it says now
        known = min(len(text), known + step)
        draft.propose(torch.tensor([text[:known]], device=device), k)
    draft.rewind(len(text) - 1)
    proposal = draft.propose(torch.tensor([text], device=device), k)
    assert proposal.tokens[0].tolist() == naive_look_up(text, longest, k)


def naive_look_up(text: list[int], longest: int, k: int) -> list[int]:
    for size in range(min(longest, len(text) - 1), 0, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + k]
    return []


@implementations(speculative)
@given(seed=seeds, rows=st.integers(1, 3), gamma=gammas, longest=st.integers(1, 3), new=st.integers(0, 14))
def test_a_look_up_changes_no_token(device, impl, seed, rows, gamma, longest, new):
    target, prompt = model(device, seed), prompts(device, seed, rows, 9)
    result = impl(target, PromptLookup(longest), prompt, new, gamma=gamma)
    assert_tokens(result.tokens, generate(target, prompt, new, graph=False), f"{seed=} {gamma=}")


@on_devices()
def test_a_look_up_pays_on_a_text_that_repeats(device):
    class Counting:
        """After t comes t + 1 modulo 4."""

        config = model(device, 0).config
        new_cache = model(device, 0).new_cache

        def __call__(self, tokens: Tensor, cache: Any = None, **how: Any) -> Tensor:
            for layer in range(cache.layers):
                kv = torch.zeros(len(tokens), 1, tokens.shape[1], 4, dtype=exact(device), device=device)
                cache.append(layer, kv, kv)
            cache.commit(tokens.shape[1])
            return torch.nn.functional.one_hot((tokens + 1) % 4, VOCAB).to(exact(device))

    prompt = torch.tensor([[0, 1, 2, 3, 0]], device=device)
    result = speculative_generate(Counting(), PromptLookup(), prompt, 20, gamma=3)
    assert result.tokens[0].tolist() == [i % 4 for i in range(25)]
    assert result.target_forwards == 5 and result.acceptance == 1.0


@on_devices()
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_first_layers_share_their_weights_with_the_target(device, n):
    target = model(device, 0, 3)
    draft = first_layers(target, n)
    assert draft.config.layers == n
    own = {id(p) for p in target.parameters()}
    assert all(id(p) in own for p in draft.parameters())


@on_devices()
@pytest.mark.parametrize("format", ["int8", "nf4"])
@given(seed=seeds, gamma=gammas)
def test_a_quantized_copy_is_a_draft_and_leaves_the_target_alone(device, format, seed, gamma):
    config = ModelConfig(vocab_size=VOCAB, layers=2, width=16, heads=2, max_length=64)
    narrow = Transformer.seeded(config, seed, torch.float32, device).requires_grad_(False)
    target = Transformer.seeded(config, seed, exact(device), device).requires_grad_(False)
    prompt = prompts(device, seed, 1, 4)
    before = {name: weight.clone() for name, weight in narrow.named_parameters()}
    result = speculative_generate(target, quantized_copy(narrow, format), prompt, 12, gamma=gamma)
    assert_tokens(result.tokens, generate(target, prompt, 12, graph=False), f"{seed=} {gamma=} {format}")
    for name, weight in narrow.named_parameters():
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PromptLookup(0), ValueError, "longest: got 0, accepted are 1 and above"),
        (lambda: PromptLookup(2, 3), ValueError, "longest: got 2, accepted are 3 and above"),
        (lambda: PromptLookup(3, 0), ValueError, "shortest: got 0, accepted are 1 and above"),
        (lambda: PromptLookup(2.0), TypeError, "longest: got 2.0, accepted is an int"),
        (lambda: first_layers(model("cpu", 0), 3), ValueError, "n: got 3, accepted are 1 to 2 layers"),
        (lambda: first_layers("a model", 1), TypeError, "model: got str, accepted is one with the method"),
    ],
)
def test_refuses_bad_arguments_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


@implementations(speculative)
@pytest.mark.parametrize("counts", [[3, 0], [-1, 0]])
def test_refuses_counts_that_do_not_fit(device, impl, counts):
    target, draft = model(device, 0), ModelDraft(model(device, 1))
    draft.propose = lambda committed, k, *more: Proposal(committed.new_zeros(2, 2), counts=counts)
    with pytest.raises(ValueError, match="draft: proposed counts"):
        impl(target, draft, prompts(device, 0, 2, 3), 5, gamma=2)
