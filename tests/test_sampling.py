"""What the law of the next token, and a draw from it, must never get wrong."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from perf_lab.numerics import assert_close, check, eps
from perf_lab.op import Implementation
from perf_lab.pytest_plugin import implementations, on_devices
from perf_lab.sampling import GREEDY_BELOW, Chooser, Sampling, law, pick, probabilities, sampling, seen_ids
from perf_lab.strategies import Input, inputs

from .mutants.sampling import Law

seeds = st.integers(0, 2**16)
shares = st.sampled_from([0.0, 1.0]) | st.floats(0.01, 0.99)
optional = st.none() | shares
penalties = st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0])  # exact in binary: they make no new ties
LOGITS = ("normal", "zeros", "ties", "huge", "outliers", "negative")


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
    logits=inputs((2, 13), torch.float32, LOGITS),
    temperature=st.floats(1e-2, 1e2),
    top_k=st.none() | st.integers(1, 13),
    top_p=optional,
    min_p=optional,
    penalty=st.none() | penalties,
    marks=seeds,
)
def test_every_step_has_its_say_in_its_order(
    device, impl, logits, temperature, top_k, top_p, min_p, penalty, marks
):
    seen = torch.rand(2, 13, generator=torch.Generator().manual_seed(marks)) < 0.4
    how = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": penalty, "seen": seen}
    assume(clear(logits.on().double(), temperature, **how))
    check(impl, logits, temperature=temperature, device=device, **how)


def clear(logits: Tensor, temperature: float, **how: Any) -> bool:
    """Whether float32 decides top_p and min_p as float64 does: no mass and no ratio is near its boundary."""
    top_p, min_p = how.pop("top_p"), how.pop("min_p")
    p = law(logits, temperature, **how)
    size = law(logits, temperature, **how) * 0 + logits.abs().amax(-1, keepdim=True)
    penalty = how["repetition_penalty"] or 1.0
    # each exponent is off by eps |z| or, penalized, by the roundings of two logits
    off = 8 * eps(torch.float32) * (p.shape[-1] + 2 * size * max(penalty, 1 / penalty) / temperature)
    ordered = p.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    near = torch.zeros_like(p, dtype=torch.bool)
    if top_p is not None and top_p < 1:
        near |= (before - top_p).abs() <= off
        near[..., 0] = False
    if min_p is not None:
        ratio = p / p.amax(-1, keepdim=True)
        near |= ((ratio - min_p).abs() <= off * ratio) & (ratio != 1) & (ratio > 0)
    return not bool(near.any()) and bool((off < 0.1).all() | (top_p is None and min_p is None))


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
@given(bits=st.integers(0, 5), data=st.data(), level=st.integers(-3, 3), temperature=st.floats(0.1, 10))
def test_top_p_stops_where_its_mass_is_reached_exactly(device, impl, bits, data, level, temperature):
    count = 2**bits  # equal shares of 2^-bits, whose sums are exact
    reached = data.draw(st.integers(0, count), label="reached")
    logits = torch.full((1, count + 1), float(level), device=device)
    logits[0, 0] = -math.inf
    kept = impl(logits, temperature, top_p=reached / count) > 0
    # the lowest ids of the equal ones; at least one
    assert kept[0].nonzero().flatten().tolist() == list(range(1, max(1, reached) + 1))


@implementations(sampling)
@given(seed=seeds, values=st.sampled_from(LOGITS), temperature=st.floats(1e-2, 1e2), min_p=shares)
def test_min_p_is_measured_against_the_largest(device, impl, seed, values, temperature, min_p):
    logits = Input((2, 19), "float32", seed, values).on(device)
    plain, kept = impl(logits, temperature).cpu().double(), impl(logits, temperature, min_p=min_p).cpu() > 0
    ratio = plain / plain.amax(-1, keepdim=True)
    slack = 1e3 * eps(torch.float32)  # each probability is right within far less, for exponents below 1e2
    assert (kept[ratio >= min_p * (1 + slack)] | (ratio == 0)[ratio >= min_p * (1 + slack)]).all()
    assert not kept[ratio < min_p * (1 - slack)].any()
    assert kept.gather(1, logits.cpu().argmax(-1, keepdim=True)).all()


@implementations(sampling)
@given(
    logits=inputs((4, 9), torch.float32, LOGITS),
    temperature=st.sampled_from([GREEDY_BELOW, 1e-6, 1.0, 1e6]),
    top_p=optional,
    min_p=optional,
    top_k=st.none() | st.integers(1, 9),
)
def test_one_token_always_survives_the_best(device, impl, logits, temperature, top_p, min_p, top_k):
    x = logits.on(device)
    got = impl(x, temperature, top_k, top_p, min_p)
    assert got.isfinite().all() and (got >= 0).all()
    assert (got.gather(-1, x.argmax(-1, keepdim=True)) > 0).all()
    assert_close(got.sum(-1), torch.ones(4, dtype=torch.float64), 9 * eps(torch.float32), repr(logits))


@implementations(sampling)
@given(seed=seeds, dtype=st.sampled_from([torch.float16, torch.bfloat16]), temperature=st.floats(0.1, 5))
def test_half_precision_logits_lose_nothing_more(device, impl, seed, dtype, temperature):
    logits = Input((2, 33), "float32", seed).on(device).to(dtype)
    assert torch.equal(impl(logits, temperature), impl(logits.float(), temperature))


@implementations(sampling)
@given(seed=seeds, penalty=penalties, level=st.floats(0.1, 3))
def test_a_penalty_above_one_makes_seen_tokens_rarer_whatever_their_sign(device, impl, seed, penalty, level):
    logits = torch.tensor([[level, -level, 0.0, level, -level]], device=device)
    seen = torch.tensor([[True, True, True, False, False]], device=device)
    p = impl(logits, 1.0, repetition_penalty=penalty, seen=seen)[0].tolist()
    for known, fresh in ((0, 3), (1, 4)):
        assert (p[known] < p[fresh]) == (penalty > 1) and (p[known] > p[fresh]) == (penalty < 1)
    unseen = impl(logits, 1.0, repetition_penalty=penalty, seen=torch.zeros_like(seen))
    assert torch.equal(unseen, impl(logits, 1.0))


@implementations(sampling)
@given(
    seed=seeds,
    temperature=st.floats(0.2, 5),
    top_k=st.none() | st.integers(1, 23),
    top_p=st.none() | st.floats(0.05, 0.999),
    min_p=st.none() | st.floats(0.0, 1.0),
    penalty=st.none() | st.floats(0.5, 2.0),
    given=st.lists(st.integers(0, 22), min_size=1, max_size=6),
)
def test_the_law_is_that_of_transformers(
    device, impl, seed, temperature, top_k, top_p, min_p, penalty, given
):
    logits = Input((1, 23), "float64", seed).on("cpu")
    should_be = theirs(logits, torch.tensor([given]), temperature, top_k, top_p, min_p, penalty)
    seen = seen_ids(torch.tensor([given]), 23).to(device)
    dtype = torch.float32 if device == "mps" else torch.float64
    got = impl(logits.to(device, dtype), temperature, top_k, top_p, min_p, penalty, seen).cpu().double()
    # float64 on both sides: the closest of two sums is no boundary in practice. 2 V roundings of terms below
    # 1, and those of exponents below 23 / 0.2
    assert_close(got, should_be, 23 * 100 * eps(dtype), f"{seed=} {temperature=} {given=}")


def theirs(
    logits: Tensor, ids: Tensor, temperature: float, top_k: Any, top_p: Any, min_p: Any, penalty: Any
) -> Tensor:
    """The law [B, V] by the logits processors of transformers, in the order of its generate."""
    lp = pytest.importorskip("transformers").generation.logits_process
    steps = [lp.RepetitionPenaltyLogitsProcessor(penalty)] if penalty is not None else []
    steps += [lp.TemperatureLogitsWarper(temperature)]
    steps += [lp.TopKLogitsWarper(top_k)] if top_k is not None else []
    steps += [lp.TopPLogitsWarper(top_p)] if top_p is not None else []
    steps += [lp.MinPLogitsWarper(min_p)] if min_p is not None else []
    for step in steps:
        logits = step(ids, logits)
    return logits.softmax(-1)


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


@on_devices()
@given(
    given=st.lists(st.lists(st.integers(0, 8), min_size=4, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_seen_ids_are_those_of_a_row_without_its_padding(device, given, data):
    rows = len(given)
    pads = data.draw(st.none() | st.lists(st.integers(0, 4), min_size=rows, max_size=rows), label="pads")
    tokens = torch.tensor(given, device=device)
    seen = seen_ids(tokens, 9, None if pads is None else torch.tensor(pads, device=device))
    for row, skipped, marks in zip(given, pads or [0] * rows, seen.tolist(), strict=True):
        assert [i for i, mark in enumerate(marks) if mark] == sorted(set(row[skipped:]))


@on_devices()
@given(seed=seeds, penalty=st.sampled_from([1e3, 1e-3]), temperature=st.sampled_from([0.0, 1e-6]))
def test_a_chooser_remembers_what_it_chose(device, seed, penalty, temperature):
    logits = 1 + Input((2, 6), "float32", seed).on(device).abs()  # all above 1: 1e3 puts seen ones last
    choose = Chooser(
        Sampling(temperature, repetition_penalty=penalty), torch.zeros(2, 1).long().to(device), 6, 6
    )
    chosen = torch.stack([choose(step, logits) for step in range(6)], 1).tolist()
    for row, best in zip(chosen, logits.tolist(), strict=True):
        others = sorted(range(1, 6), key=lambda i: -best[i])
        assert row == ([*others, row[-1]] if penalty > 1 else [0] * 6)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature: got -1.0, accepted are finite numbers from 0 on"),
        ({"temperature": math.nan}, ValueError, "temperature: got nan"),
        ({"temperature": "hot"}, ValueError, "temperature: got 'hot'"),
        ({"top_k": 0}, ValueError, "top_k: got 0, accepted are 1 and above"),
        ({"top_k": 1.0}, TypeError, "top_k: got 1.0, accepted is an int"),
        ({"top_p": 1.1}, ValueError, "top_p: got 1.1, accepted are numbers from 0 to 1"),
        ({"min_p": -0.1}, ValueError, "min_p: got -0.1, accepted are numbers from 0 to 1"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty: got 0, accepted are finite numbers"),
        ({"repetition_penalty": math.inf}, ValueError, "repetition_penalty: got inf, accepted are"),
    ],
)
def test_refuses_bad_arguments_by_name(changed, error, message):
    with pytest.raises(error, match=message):
        Sampling(**changed)


def test_the_law_that_the_mutants_vary_is_right():
    right = Implementation(sampling, "unmutated", Law.call, ("cpu",), (torch.float32,))
    test_every_step_has_its_say_in_its_order(device="cpu", impl=right)
    test_the_law_is_that_of_transformers(device="cpu", impl=right)
