"""What the attention kernels promise beyond the op's contract: splits, captured calls, torch's compiler."""

import dataclasses
import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perf_lab.attention import attention, triton_flash, triton_split
from perf_lab.numerics import build, check, judge, within_limits
from perf_lab.op import FLOATS
from perf_lab.pytest_plugin import implementations, on_devices
from perf_lab.strategies import Input, dtype_name, inputs, lengths


def takes_splits(impl):
    return "splits" in inspect.signature(impl.fn).parameters


@st.composite
def decodings(draw, dtype, slow):
    """q, k, v of 1 to 16 queries, and how: causal, window, mask and lengths by row."""
    B, Hkv, group, Tq = (draw(st.integers(1, most)) for most in (2, 2, 3 if slow else 8, 4 if slow else 16))
    Tk, D = draw(lengths(80 if slow else 700)), draw(st.sampled_from((16, 40, 64, 80, 128, 256)))
    shapes = (B, Hkv * group, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, D)
    how = draw(st.sampled_from(({}, {"causal": True}, {"causal": True, "window": draw(lengths(Tk + 3, 1))})))
    if draw(st.booleans()):
        kind = draw(st.sampled_from(("bool", dtype_name(dtype))))
        how["mask"] = Input((B, 1, 1, Tk), kind, draw(st.integers(0, 99)), "holes")  # as padding is
    if draw(st.booleans()):
        how["lengths"] = torch.tensor([draw(lengths(Tk)) for _ in range(B)], dtype=torch.int32)
    return [draw(inputs(shape, dtype, ("normal", "ties"))) for shape in shapes], how


@implementations(attention, dtypes=True, only=takes_splits)
@given(data=st.data(), splits=st.integers(1, 9))
def test_any_number_of_splits_matches_the_oracle(device, impl, dtype, data, splits):
    tensors, how = data.draw(decodings(dtype, impl.slow_on(device)), label="q, k, v; how")
    check(impl, *tensors, device=device, splits=splits, **how)


@implementations(attention, only=takes_splits)
@given(splits=st.sampled_from((0, -1, 2.0)))
def test_splits_below_one_are_refused(device, impl, splits):
    q = torch.zeros(1, 1, 2, 4, device=device)
    with pytest.raises(ValueError, match=f"splits: got {splits}"):
        impl(q, q, q, splits=splits)


def captured(call, device):
    """A function that repeats the call: on a GPU the replay of a graph that holds it."""
    if device != "cuda":
        return call
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # compiles, outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay():
        graph.replay()
        return result

    return replay


@implementations(attention, dtypes=True)
@within_limits
def test_a_captured_call_follows_the_lengths(device, impl, dtype):
    """As a decode loop uses it: a buffer of more room than keys, lengths that grow on the device."""
    capacity = 48 if impl.slow_on(device) else 1500
    q = Input((2, 4, 1, 64), dtype_name(dtype)).on(device)
    k, v = (
        Input((2, 2, capacity + 5, 64), dtype_name(dtype), seed).on(device)[:, :, :capacity]
        for seed in (1, 2)
    )
    counts = torch.tensor([3, 1], dtype=torch.int32, device=device)
    impl(q, k, v, causal=True, lengths=counts)  # raises where a limit applies
    attend = captured(lambda: impl.fn(q, k, v, causal=True, lengths=counts), device)
    for now in ([3, 1], [4, 2], [capacity // 2, 33], [capacity, capacity - 1], [0, 7]):
        counts.copy_(torch.tensor(now))
        how = {"causal": True, "lengths": counts}
        judge(impl, attend(), (q, k, v), how, f"replayed with lengths {now}")


OPERATORS = {"flash": triton_flash.flash, "split": triton_split.split}


@implementations(attention, only=lambda impl: impl.interpreted)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_operator_is_what_torch_expects(device, impl, dtype):
    """Its schema, its fake result and its registration; opcheck runs it in all of these ways."""
    op = OPERATORS.get(impl.name, impl.fn).operator
    name = dtype_name(dtype)
    q, k, v = (Input((2, heads, T, 16), name, heads).on(device) for heads, T in ((4, 3), (2, 9), (2, 9)))
    counts = torch.tensor([9, 4], device=device)
    for args, how in (((q, k, v, True, None, 5), {"lengths": counts}), ((q.mT.contiguous().mT, k, v), {})):
        checks = torch.library.opcheck(op, args, how, raise_exception=False)
        assert all(result == "SUCCESS" for result in checks.values()), checks


@implementations(attention, only=lambda impl: impl.interpreted)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_compiled_model_gives_what_the_call_gives(device, impl, dtype):
    name = dtype_name(dtype)
    q, k, v = (build(Input((2, heads, 9, 16), name, heads), device) for heads in (4, 2, 2))
    fn = impl.fn
    backend = "inductor" if device == "cuda" else "aot_eager"

    @torch.compile(fullgraph=True, backend=backend)
    def model(q, k, v):
        return fn(q * 2, k, v, causal=True) + 1

    assert torch.equal(model(q, k, v), fn(q * 2, k, v, causal=True) + 1)


CUTS = (16, 16, 4, 1), (32, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 2)  # queries, keys, warps, stages


@on_devices("cpu", "cuda")
@given(data=st.data(), cut=st.sampled_from(CUTS), together=st.integers(1, 9), causal=st.booleans())
def test_any_cut_of_flash_matches_the_oracle(device, data, cut, together, causal):
    """Also any number of heads whose tiles go heaviest first, the last band of them not being whole."""
    B, heads, T, D = (data.draw(st.integers(1, most)) for most in (2, 5, 40 if device == "cpu" else 300, 128))
    q, k, v = (data.draw(inputs((B, heads, T, D), torch.float16, ("normal",))) for _ in range(3))
    cut = triton_flash.Tiles(*cut)

    def fn(q, k, v, *, causal):
        return triton_flash.run(q, k, v, causal=causal, cut=cut, together=together)

    check(dataclasses.replace(attention["flash"], fn=fn), q, k, v, causal=causal, device=device)
