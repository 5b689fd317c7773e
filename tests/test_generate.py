"""What generation must never get wrong."""

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perf_lab.generate import generate, generation, stream
from perf_lab.model import ModelConfig, decoder, oracle
from perf_lab.numerics import eps
from perf_lab.pytest_plugin import implementations, on_devices
from perf_lab.sampling import GREEDY_BELOW, sampling, seen_ids

from .test_kv_cache import refuses, takes
from .test_model import BARS, SMALL, build, configs, dtypes, empty_cache, ids, seeds

budgets = st.integers(0, 8)
prompts = st.integers(1, 8)
temperatures = st.sampled_from([0.0, 0.3, 1.0, 2.5])


@implementations(generation)
@given(
    config=configs(),
    seed=seeds,
    batch=st.integers(1, 2),
    given=prompts,
    new=budgets,
    temperature=temperatures,
)
def test_a_cache_changes_no_token(device, impl, config, seed, batch, given, new, temperature):
    model, prompt = small(config, seed, device), ids(config, (batch, given), seed, device)
    how = {"temperature": temperature, "top_k": 5}
    cached = impl(model, prompt, new, cache=True, generator=random(seed), **how)
    uncached = impl(model, prompt, new, cache=False, generator=random(seed), **how)
    assert torch.equal(cached, uncached)


@implementations(generation)
@given(config=configs(), seed=seeds, given=prompts, new=budgets, cached=st.booleans(), data=st.data())
def test_greedy_tokens_have_the_largest_logits(device, impl, config, seed, given, new, cached, data):
    dtype = data.draw(st.sampled_from(dtypes(device)), label="dtype")
    model, prompt = small(config, seed, device, dtype), ids(config, (1, given), seed, device)
    result = impl(model, prompt, new, cache=cached).cpu()
    logits = oracle(config, model.state_dict(), result[0, :-1])[given - 1 :]  # [new, V]
    chosen = logits.gather(1, result[0, given:, None])[:, 0]
    # Two logits, each wrong by the bar, change places only when they are this close.
    assert (chosen >= logits.amax(1) - 2 * BARS[dtype] * logits.abs().max()).all() if new else True


@implementations(generation)
@given(
    config=configs(),
    seed=seeds,
    given=prompts,
    new=st.integers(1, 8),
    temperature=st.floats(0.1, 5),
    top_k=st.none() | st.integers(1, 19),
    top_p=st.none() | st.floats(0.05, 0.95),
    min_p=st.none() | st.floats(0.01, 0.5),
    penalty=st.none() | st.floats(0.5, 2.0),
)
def test_sampled_tokens_are_those_of_the_law(
    device, impl, config, seed, given, new, temperature, top_k, top_p, min_p, penalty
):
    model, prompt = small(config, seed, device), ids(config, (2, given), seed, device)
    how = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": penalty}
    result = impl(model, prompt, new, temperature=temperature, generator=random(seed), **how).cpu()
    uniform = torch.rand(new, 2, 1, generator=random(seed)).double()
    for row, tokens in enumerate(result):
        logits = oracle(config, model.state_dict(), tokens[:-1])[given - 1 :]
        slack = slack_of(model, logits, temperature / max(penalty or 1, 1 / (penalty or 1)))
        seen = torch.cat([seen_ids(tokens[None, :end], 19) for end in range(given, given + new)])
        p = sampling.oracle(logits, temperature, **how, seen=seen)  # [new, V]
        upper = p.cumsum(1).gather(1, tokens[given:, None])
        lower = upper - p.gather(1, tokens[given:, None])
        assert (upper - lower > 0).all(), "a token of probability 0"
        assert ((lower - slack <= uniform[:, row]) & (uniform[:, row] <= upper + slack)).all()


@implementations(generation)
@given(config=configs(), seed=seeds, lengths=st.lists(prompts, min_size=1, max_size=3), new=budgets)
def test_a_penalty_counts_for_greedy_too_and_sees_no_padding(device, impl, config, seed, lengths, new):
    model, prompt = small(config, seed, device), ids(config, (len(lengths), max(lengths)), seed, device)
    result = impl(model, prompt, new, lengths=lengths, repetition_penalty=1e4).cpu()
    for row, length in zip(result, lengths, strict=True):
        row = row[max(lengths) - length :]
        logits = oracle(config, model.state_dict(), row[:-1])
        for at in range(length, length + new):
            best = logits[at - 1].clone()
            used = row[:at].unique()
            best[used] = torch.where(best[used] > 0, best[used] / 1e4, best[used] * 1e4)
            assert best[row[at]] >= best.max() - 1e4 * 2 * BARS[torch.float64] * logits.abs().max()


@implementations(generation)
@given(
    config=configs(),
    seed=seeds,
    lengths=st.lists(prompts, min_size=1, max_size=3),
    new=budgets,
    cached=st.booleans(),
)
def test_a_left_padded_row_is_as_if_alone(device, impl, config, seed, lengths, new, cached):
    model, prompt = small(config, seed, device), ids(config, (len(lengths), max(lengths)), seed, device)
    together = impl(model, prompt, new, cache=cached, lengths=lengths)
    for row, length in enumerate(lengths):
        alone = impl(model, prompt[row : row + 1, -length:], new, cache=cached)
        assert torch.equal(together[row : row + 1, -length - new :], alone), f"row {row}"


@implementations(generation)
@given(
    config=configs(),
    seed=seeds,
    batch=st.integers(1, 3),
    new=st.integers(1, 8),
    temperature=temperatures,
    data=st.data(),
)
def test_a_row_ends_with_its_first_eos(device, impl, config, seed, batch, new, temperature, data):
    model, prompt = small(config, seed, device), ids(config, (batch, 3), seed, device)
    endless = impl(model, prompt, new, temperature=temperature, generator=random(seed))
    eos = data.draw(st.sampled_from(endless[:, 3:].flatten().tolist()) | st.integers(0, 18), label="eos")
    result = impl(model, prompt, new, temperature=temperature, generator=random(seed), eos=eos)
    rows = [row[: row.index(eos) + 1] if eos in row else row for row in endless[:, 3:].tolist()]
    longest = max(map(len, rows))
    assert result[:, 3:].tolist() == [row + [eos] * (longest - len(row)) for row in rows]


@implementations(generation)
@given(
    config=configs(), seed=seeds, given=prompts, new=budgets, cached=st.booleans(), temperature=temperatures
)
def test_the_result_is_the_prompt_and_the_new_tokens(
    device, impl, config, seed, given, new, cached, temperature
):
    model, prompt = small(config, seed, device), ids(config, (2, given), seed, device)
    result = impl(model, prompt, new, cache=cached, temperature=temperature)
    assert result.shape == (2, given + new) and result.dtype == torch.int64
    assert torch.equal(result[:, :given], prompt)
    assert result.min() >= 0 and result.max() < config.vocab_size


@implementations(generation)
@given(config=configs(), seed=seeds, given=prompts, new=budgets, data=st.data())
def test_a_cache_that_is_given_is_used_and_grows_by_what_is_new(device, impl, config, seed, given, new, data):
    known = data.draw(st.integers(0, given - 1), label="known")
    model, cache = small(config, seed, device), None
    for turn in range(3):
        prompt = ids(config, (1, given), seed + turn, device)
        cache = cache or empty_cache(model, 1, given + new)
        cache.truncate(0)
        model(prompt[:, :known], cache)
        should_be = impl(model, prompt, new, cache=False)
        assert torch.equal(impl(model, prompt, new, cache=cache), should_be)
        assert cache.length == (given + new - 1 if new else known)


@implementations(generation)
@given(
    config=configs(),
    seed=seeds,
    temperature=st.sampled_from([5e-324, 1e-45, 1e-38, GREEDY_BELOW, 1e-30, 1e-9]),
)
def test_a_temperature_near_zero_is_greedy(device, impl, config, seed, temperature):
    model, prompt = small(config, seed, device), ids(config, (2, 3), seed, device)
    cold = impl(model, prompt, 6, temperature=temperature, generator=random(seed))
    assert torch.equal(cold, impl(model, prompt, 6, temperature=0.0))


@implementations(generation)
@given(seed=seeds, temperature=st.sampled_from([0.7, 1.0]), cached=st.booleans())
def test_the_same_seed_gives_the_same_tokens_and_another_others(device, impl, seed, temperature, cached):
    model, prompt = small(SMALL, 0, device), ids(SMALL, (4, 3), 0, device)
    first, again, other = (
        impl(model, prompt, 6, cache=cached, temperature=temperature, generator=random(s))
        for s in (seed, seed, seed + 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)  # 24 tokens of 19 kinds


@on_devices()
@given(
    config=configs(),
    seed=seeds,
    batch=st.integers(1, 3),
    new=budgets,
    temperature=temperatures,
    eos=st.none() | st.integers(0, 18),
)
def test_a_stream_gives_the_new_tokens_of_generate_one_by_one(
    device, config, seed, batch, new, temperature, eos
):
    model, prompt = small(config, seed, device), ids(config, (batch, 3), seed, device)
    how = {"temperature": temperature, "top_p": 0.9, "eos": eos}
    should_be = generate(model, prompt, new, generator=random(seed), **how)[:, 3:]
    streamed = list(stream(model, prompt, new, generator=random(seed), **how))
    assert [tokens.tolist() for tokens in streamed] == should_be.T.tolist()


@on_devices()
@given(seed=seeds, new=st.integers(1, 8), data=st.data())
def test_a_stream_computes_no_more_than_what_was_taken(device, seed, new, data):
    model, prompt = small(SMALL, 0, device), ids(SMALL, (1, 4), seed, device)
    cache, taken = empty_cache(model, 1, 12), data.draw(st.integers(0, new), label="taken")
    tokens = stream(model, prompt, new, cache=cache, graph=data.draw(st.booleans(), label="graph"))
    assert cache.length == 0
    for _ in range(taken):
        next(tokens)
    tokens.close()
    assert cache.length == (3 + taken if taken else 0)


@on_devices()
@given(new=budgets, eos=st.none() | st.integers(0, 18))
def test_progress_is_told_after_every_token(device, new, eos):
    model, prompt, told = small(SMALL, 0, device), ids(SMALL, (2, 4), 0, device), []
    result = generate(model, prompt, new, eos=eos, progress=lambda *at: told.append(at))
    assert told == [(n + 1, new) for n in range(result.shape[1] - 4)]


def test_a_stream_refuses_at_the_call():
    with refuses(ValueError, naming="top_p"):
        stream(small(SMALL, 0, "cpu"), ids(SMALL, (1, 4), 0, "cpu"), 3, top_p=2.0)


@implementations(generation)
@given(bad=st.deferred(lambda: st.sampled_from(sorted(REFUSED))))
def test_a_refused_call_leaves_the_cache_as_it_was(device, impl, bad):
    model, prompt = small(SMALL, 0, device), ids(SMALL, (2, 5), 0, device)
    cache = empty_cache(model, 2, 4)
    model(prompt[:, :3], cache)
    naming, changed = REFUSED[bad]
    with refuses(TypeError, ValueError, naming=naming):
        impl(model, **({"prompt": prompt, "max_new_tokens": 2, "cache": cache} | changed(prompt)))
    assert cache.length == 3


@implementations(generation)
@given(given=st.integers(1, 24))
def test_the_last_position_can_be_used(device, impl, given):
    model, prompt = small(SMALL, 0, device), ids(SMALL, (1, given), 0, device)
    new = SMALL.max_length - given + 1  # the last token is not given to the model
    with takes(f"a prompt of {given} and {new} tokens more"):
        assert impl(model, prompt, new).shape == (1, given + new)
    with refuses(ValueError, naming="max_new_tokens"):
        impl(model, prompt, new + 1)


def small(config: ModelConfig, seed: int, device: str, dtype: torch.dtype | None = None) -> Any:
    """The right decoder of these sizes: here it is not the one that is judged."""
    return build(decoder["transformer"], config, seed, device, dtype)


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slack_of(model: Any, logits: Tensor, temperature: float) -> float:
    """How far a sum of probabilities can be off when each logit is wrong by the bar, and the sum rounds."""
    dtype = model.embedding.weight.dtype
    return math.expm1(2 * BARS[dtype] * logits.abs().max().item() / temperature) + logits.shape[-1] * eps(
        dtype
    )


def _change(naming: str, **changed: Any) -> Any:
    return naming, lambda prompt: changed


REFUSED: dict[str, Any] = {
    "negative budget": _change("max_new_tokens", max_new_tokens=-1),
    "budget of no int": _change("max_new_tokens", max_new_tokens=2.0),
    "budget past max_length": _change("max_new_tokens", max_new_tokens=25),
    "prompt of no tokens": ("prompt", lambda prompt: {"prompt": prompt[:, :0]}),
    "prompt of no rows": ("prompt", lambda prompt: {"prompt": prompt[:0]}),
    "prompt without a batch": ("prompt", lambda prompt: {"prompt": prompt[0]}),
    "prompt of another dtype": ("prompt", lambda prompt: {"prompt": prompt.int()}),
    "prompt of no tensor": ("prompt", lambda prompt: {"prompt": prompt.tolist()}),
    "prompt of unknown ids": ("prompt", lambda prompt: {"prompt": prompt + 19}),
    "prompt of negative ids": ("prompt", lambda prompt: {"prompt": prompt - 19}),
    "prompt of another batch than the cache": ("cache", lambda prompt: {"prompt": prompt[:1]}),
    "capacity overrun": _change("cache", max_new_tokens=4),
    "cache with all of the prompt": ("cache", lambda prompt: {"prompt": prompt[:, :3]}),
    "cache of no cache": _change("cache", cache="yes"),
    "cache of nothing": _change("cache", cache=None),
    "negative temperature": _change("temperature", temperature=-1.0),
    "infinite temperature": _change("temperature", temperature=math.inf),
    "temperature of no number": _change("temperature", temperature=math.nan),
    "top_p of more than all": _change("top_p", top_p=1.5),
    "negative min_p": _change("min_p", min_p=-0.5),
    "repetition_penalty of zero": _change("repetition_penalty", repetition_penalty=0.0),
    "top_k of none": _change("top_k", top_k=0),
    "top_k of more than there are": _change("top_k", top_k=20),
    "eos past the vocabulary": _change("eos", eos=19),
    "negative eos": _change("eos", eos=-1),
    "lengths of another batch": _change("lengths", lengths=[3]),
    "lengths of nothing": _change("lengths", lengths=[0, 3]),
    "lengths past the prompt": _change("lengths", lengths=[3, 6]),
    "lengths of no ints": _change("lengths", lengths=[3.0, 4.0]),
}
