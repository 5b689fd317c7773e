"""The gate itself: what it must let through, and what it must not."""

import ast
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perf_lab.numerics import (
    CAP,
    ULPS,
    WrongError,
    allowed_error,
    assert_close,
    call_text,
    check,
    eps,
    limits_met,
    poisoned,
)
from perf_lab.op import FLOATS, Implementation, Limit
from perf_lab.softmax import softmax
from perf_lab.strategies import LAYOUTS, VALUES, Input, inputs, lengths

dtypes = st.sampled_from(FLOATS)
shapes = st.tuples(lengths(9, smallest=1), lengths(300, smallest=1))


def outcome(got, should_be, allowed) -> bool:
    try:
        assert_close(got, should_be, allowed, "call")
    except WrongError:
        return False
    return True


@given(value=st.floats(-1e6, 1e6), allowed=st.floats(1e-9, 1e3), times=st.floats(0, 4))
def test_passes_exactly_up_to_the_allowed_error(value, allowed, times):
    should_be = torch.tensor([value], dtype=torch.float64)
    got = should_be + times * allowed
    error = (got - should_be).abs().item()  # what the addition left of it
    assert outcome(got, should_be, allowed) == (error / allowed <= 1)


@given(bad=st.sampled_from([math.nan, math.inf, -math.inf]), place=st.integers(0, 8))
def test_a_single_bad_element_is_found_and_named(bad, place):
    should_be = torch.zeros(3, 3, dtype=torch.float64)
    got = should_be.clone()
    got.view(-1)[place] = bad
    with pytest.raises(WrongError) as caught:
        assert_close(got, should_be, 1e9, "the call")
    where = [place // 3, place % 3]
    assert f"1 of 9 elements are wrong, the worst at {where}" in str(caught.value)
    assert "reproduce  the call" in str(caught.value)


@given(special=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_nan_and_infinity_are_right_where_they_should_be(special):
    should_be = torch.tensor([special, 1.0], dtype=torch.float64)
    assert outcome(should_be.clone(), should_be, 1e-9)
    assert not outcome(torch.ones(2, dtype=torch.float64), should_be, 1e-9)


def test_a_wrong_shape_is_not_broadcast():
    assert not outcome(torch.zeros(1), torch.zeros(3, dtype=torch.float64), 1.0)


@given(dtype=dtypes, n=st.integers(1, 10**6), size=st.floats(1e-3, 1e3))
def test_a_baseline_that_breaks_down_excuses_nothing(dtype, n, size):
    should_be = torch.full((4,), size, dtype=torch.float64)
    plain = allowed_error(should_be, None, should_be, dtype, n)
    for broken in (math.nan, math.inf):
        assert torch.equal(allowed_error(should_be, torch.full((4,), broken), should_be, dtype, n), plain)
    zeros = allowed_error(should_be, torch.zeros(4), should_be, dtype, n)
    assert (zeros <= (plain + 2 * CAP * should_be) * (1 + 1e-12) + 1e-30).all()


@given(dtype=dtypes, n=st.integers(1, 2**18))
def test_the_gate_is_always_narrow_enough_to_reject_zeros_and_halves(dtype, n):
    """With the worst baseline there is: so no output of all zeros passes, whatever the input."""
    should_be = torch.ones(1, dtype=torch.float64)
    assert (allowed_error(should_be, torch.zeros(1), should_be, dtype, n) < 0.25).all()


@given(dtype=dtypes)
def test_correct_rounding_is_always_allowed(dtype):
    should_be = torch.rand(1000, dtype=torch.float64)
    assert outcome(should_be.to(dtype), should_be, allowed_error(should_be, None, should_be, dtype, 1))
    assert not outcome(
        (should_be * (1 + 2 * ULPS * eps(dtype) + 4e-7)).double(),
        should_be,
        allowed_error(should_be, None, should_be, dtype, 1),
    )


def test_memory_that_nothing_wrote_holds_nan():
    with poisoned():
        assert torch.empty(7).isnan().all()
        assert torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@given(recipe=shapes.flatmap(lambda shape: st.sampled_from(FLOATS).flatmap(lambda d: inputs(shape, d))))
def test_a_recipe_rebuilds_the_same_tensor_from_its_repr(recipe):
    assert eval(repr(recipe)) == recipe
    assert torch.equal(recipe.on("cpu"), eval(repr(recipe)).on("cpu"))


@given(shape=shapes, seed=st.integers(0, 99), values=st.sampled_from(VALUES), dtype=dtypes)
def test_layouts_hold_the_same_numbers_with_nan_around_them(shape, seed, values, dtype):
    name = str(dtype).removeprefix("torch.")
    plain = Input(shape, name, seed, values).on()
    assert plain.isfinite().all()
    for layout in LAYOUTS:
        x = Input(shape, name, seed, values, layout).on()
        expected = plain[:1].expand(shape) if layout == "expanded" else plain
        assert torch.equal(x, expected)
        outside = x.untyped_storage().nbytes() // x.element_size() - min(x.numel(), len(set_of_offsets(x)))
        if outside:
            storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
            assert int(storage.isnan().sum()) == outside


def set_of_offsets(x) -> set[int]:
    index = torch.full(x.shape, x.storage_offset())
    for axis, stride in enumerate(x.stride()):
        steps = stride * torch.arange(x.shape[axis])
        index += steps.view([-1 if a == axis else 1 for a in range(x.ndim)])
    return set(index.flatten().tolist())


def test_the_message_of_a_wrong_output_says_how_to_see_it():
    half = Implementation(softmax, "half", lambda x: x.softmax(-1) / 2, ("cpu",), FLOATS)
    with pytest.raises(WrongError) as caught:
        check(half, Input((2, 3), seed=5), device="cpu")
    message = str(caught.value)
    assert message.startswith("softmax[half]: 6 of 6 elements are wrong")
    call = message.partition("reproduce  ")[2]
    ast.parse(call)
    assert call == "check(load_all()['softmax']['half'], Input((2, 3), seed=5), device='cpu')"
    assert call_text(half, (Input((2, 3), seed=5),), {}, "cpu") == call


def test_a_wrong_dtype_is_an_error():
    wide = Implementation(softmax, "wide", lambda x: x.double().softmax(-1), ("cpu",), FLOATS)
    with pytest.raises(WrongError, match="wrong dtype"):
        check(wide, Input((2, 3)), device="cpu")


def test_a_stated_limit_is_counted_not_hidden():
    limit = Limit("rows above 2", lambda x: x.shape[0] > 2)
    small = Implementation(softmax, "small", lambda x: x.softmax(-1), ("cpu",), FLOATS, limits=(limit,))
    assert check(small, Input((2, 3))) is not None
    before = limits_met["softmax[small]: rows above 2"]
    assert check(small, Input((3, 3))) is None
    assert limits_met["softmax[small]: rows above 2"] == before + 1
    del limits_met["softmax[small]: rows above 2"]  # or the summary of this run would show it
