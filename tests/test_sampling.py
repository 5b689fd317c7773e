"""What the law of the next token, and a draw from it, must never get wrong."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from perf_lab.numerics import check, eps
from perf_lab.pytest_plugin import implementations, on_devices
from perf_lab.sampling import GREEDY_BELOW, pick, probabilities, sampling
from perf_lab.strategies import Input, inputs

seeds = st.integers(0, 2**16)


@implementations(sampling)
@given(
    logits=inputs((3, 17), torch.float32),
    temperature=st.sampled_from([GREEDY_BELOW, 1e-20, 1e-8, 1.0]) | st.floats(1e-3, 1e3),
    top_k=st.none() | st.integers(1, 17),
)
def test_probabilities_are_the_softmax_of_the_kept_logits(device, impl, logits, temperature, top_k):
    check(impl, logits, temperature=temperature, top_k=top_k, device=device)


@implementations(sampling)
@given(
    seed=seeds,
    rows=st.integers(1, 4),
    vocabulary=st.integers(1, 30),
    values=st.sampled_from(["ties", "normal"]),
    data=st.data(),
)
def test_top_k_keeps_exactly_k_and_of_equal_logits_the_lower_ids(
    device, impl, seed, rows, vocabulary, values, data
):
    k = data.draw(st.integers(1, vocabulary), label="k")
    logits = Input((rows, vocabulary), "float32", seed, values).on(device)
    kept = impl(logits, 1.0, k) > 0
    assert kept.sum(-1).tolist() == [k] * rows
    for row, keeps in zip(logits.tolist(), kept.tolist(), strict=True):
        order = sorted(range(vocabulary), key=lambda i: (-row[i], i))
        assert sorted(order[:k]) == [i for i in range(vocabulary) if keeps[i]]


@implementations(sampling)
@given(seed=seeds, dtype=st.sampled_from([torch.float16, torch.bfloat16]), temperature=st.floats(0.1, 5))
def test_half_precision_logits_lose_nothing_more(device, impl, seed, dtype, temperature):
    logits = Input((2, 33), "float32", seed).on(device).to(dtype)
    assert torch.equal(impl(logits, temperature), impl(logits.float(), temperature))


@on_devices()
@given(seed=seeds, vocabulary=st.integers(1, 40), top_k=st.integers(1, 40), count=st.integers(1, 500))
def test_each_token_has_its_share_of_the_numbers(device, seed, vocabulary, top_k, count):
    p = probabilities(Input((vocabulary,), "float32", seed).on(device), 0.5, top_k)
    uniform = (torch.arange(count, device=device)[:, None] + 0.5) / count  # a grid: no statistics
    chosen = pick(p.expand(count, vocabulary), uniform).cpu()
    below = torch.bincount(chosen, minlength=vocabulary).cumsum(0)
    # Half a point for the grid; the running sum and the number times the total round by eps/2 a term.
    allowed = 0.5 + count * (vocabulary + 2) * eps(torch.float32)
    assert ((below - count * p.cpu().double().cumsum(0)).abs() <= allowed).all()


@on_devices()
@given(
    seed=seeds,
    vocabulary=st.integers(1, 40),
    top_k=st.integers(1, 40),
    edge=st.sampled_from([0.0, 1 - 2**-24]),
)
def test_a_token_of_probability_zero_is_never_chosen(device, seed, vocabulary, top_k, edge):
    p = probabilities(Input((8, vocabulary), "float32", seed).on(device), 0.5, top_k)
    chosen = pick(p, torch.full((8, 1), edge, device=device))
    assert (p.gather(1, chosen[:, None]) > 0).all()
