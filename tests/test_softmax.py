"""What a softmax must never get wrong."""

import dataclasses
import itertools
import math
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perf_lab import numerics
from perf_lab.numerics import assert_close, check, judge, poisoned, upcast
from perf_lab.op import Implementation, LimitError
from perf_lab.pytest_plugin import implementations, on_devices
from perf_lab.softmax import softmax
from perf_lab.strategies import LAYOUTS, VALUES, Input, dtype_name, inputs, lengths

# around the edges of blocks, of a row in registers (32768) and of the steps of a longer one (8192)
LENGTHS = (
    *(1, 2, 3, 15, 16, 17, 127, 128, 129, 1023, 1024, 1025, 4095, 4096, 4097),
    *(16383, 16384, 16385, 32767, 32768, 32769, 49152, 65537, 262144, 1048577),
)
SHAPES = st.one_of(
    st.tuples(lengths(1100)),
    st.tuples(lengths(9), lengths(1100)),
    st.tuples(lengths(3), lengths(4), lengths(300)),
)


def run(impl: Implementation, x: Tensor) -> Tensor:
    """The result, unchecked, into poisoned memory; what a stated limit keeps out is a visible skip."""
    try:
        with poisoned():
            return impl(x)
    except LimitError as limit:
        pytest.skip(str(limit))


def allowed(x: Tensor) -> Tensor:
    """The error that the gate allows on x."""
    wide = upcast(x)
    plain = torch.softmax(x, -1)
    return numerics.allowed_error(softmax.oracle(wide), plain, softmax.magnitude(wide), x.dtype, x.shape[-1])


def kernels_compiled() -> int:
    """How often torch.compile has compiled anything in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def is_operator(impl: Implementation) -> bool:
    """Whether compiled programs call it as one operator."""
    return hasattr(impl.fn, "operator")


def room(impl: Implementation) -> types.ModuleType:
    """The module that holds an implementation of ours."""
    return sys.modules[impl.fn.__module__]


@implementations(softmax, dtypes=True)
@given(data=st.data())
def test_matches_the_oracle(device, impl, dtype, data):
    shape = data.draw(SHAPES, label="shape")
    x = data.draw(inputs(shape, dtype, values=(*VALUES, "holes")), label="x")
    check(impl, x, device=device)


@implementations(softmax)
def test_any_row_length(device, impl):
    for columns in LENGTHS:
        check(impl, Input((1 if columns > 2**16 else 2, columns), seed=columns), device=device)


@implementations(softmax)
@given(columns=lengths(5000, smallest=2), seed=st.integers(0, 99))
def test_does_not_overflow(device, impl, columns, seed):
    check(impl, Input((3, columns), "float32", seed, values="huge"), device=device)


@implementations(softmax, dtypes=True)
@given(columns=lengths(4096, smallest=1), value=st.sampled_from((0.0, 1.0, -3.0, 300.0, -60000.0)))
def test_equal_inputs_share_equally(device, impl, dtype, columns, value):
    y = run(impl, torch.full((2, columns), value, dtype=dtype, device=device))
    # weights are exp(0) and their sum is exact; what rounds is 1/sum (float32) and the result
    error = numerics.eps(dtype) + numerics.eps(torch.float32)
    share = torch.full((2, columns), 1 / columns, dtype=torch.float64)
    assert_close(y, share, error / columns, f"{impl} of {columns} times {value}")


@implementations(softmax, dtypes=True)
@given(columns=lengths(600, smallest=1), seed=st.integers(0, 99), values=st.sampled_from(VALUES))
def test_a_row_sums_to_one(device, impl, dtype, columns, seed, values):
    x = Input((3, columns), dtype_name(dtype), seed, values).on(device)
    sums = upcast(run(impl, x)).sum(-1)
    error = allowed(x).sum(-1).to(sums.device)
    assert_close(sums, torch.ones_like(sums), error, f"{impl}, {columns} columns, {values}, seed {seed}")


@implementations(softmax)
@given(columns=lengths(1100, smallest=1), seed=st.integers(0, 99), shift=st.integers(-(2**14), 2**14))
def test_a_shift_changes_nothing(device, impl, columns, seed, shift):
    generator = torch.Generator().manual_seed(seed)
    # multiples of 1/64 up to 8: the shifted sum needs 21 of float32's 24 bits, so it is exact
    x = (torch.randint(-512, 513, (2, columns), generator=generator) / 64).to(device)
    assert torch.equal(run(impl, x), run(impl, x + shift))


@implementations(softmax)
@given(columns=lengths(300, smallest=2), seed=st.integers(0, 99))
def test_what_is_masked_gets_exactly_zero(device, impl, columns, seed):
    x = Input((4, columns), "float32", seed, "holes").on(device)
    x[:, seed % columns] = 1.0  # every row sees something
    y = check(impl, x, device=device)
    assert y is None or (y[x == -math.inf] == 0).all()


@implementations(softmax)
@given(
    bad=st.sampled_from((math.inf, -math.inf, math.nan)),
    columns=lengths(300, smallest=1),
    place=st.integers(0, 299),
)
def test_what_is_not_finite_stays_in_its_row(device, impl, bad, columns, place):
    x = Input((3, columns)).on(device)
    x[1, place % columns] = bad
    check(impl, x, device=device)


@implementations(softmax)
@given(columns=lengths(1100, smallest=2), seed=st.integers(0, 99))
def test_permuting_the_input_permutes_the_result(device, impl, columns, seed):
    x = Input((2, columns), "float32", seed).on(device)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)).to(device)
    got, should_be = run(impl, x[:, order]), upcast(run(impl, x)[:, order])
    error = 2 * allowed(x[:, order])  # each of the two has its own
    assert_close(got, should_be, error, f"{impl}, {columns} columns, seed {seed}")


@implementations(softmax)
@given(shape=st.tuples(lengths(9, smallest=2), lengths(300, smallest=1)), row=st.integers(0, 8))
def test_rows_share_nothing(device, impl, shape, row):
    x = Input(shape).on(device)
    others = torch.full_like(x, math.nan)
    row %= shape[0]
    others[row] = x[row]
    assert torch.equal(run(impl, x)[row], run(impl, others)[row])


@implementations(softmax, dtypes=True)
def test_strides_do_not_matter(device, impl, dtype):
    for shape, layout in itertools.product(((70,), (5, 129), (2, 3, 40)), LAYOUTS):
        check(impl, Input(shape, dtype_name(dtype), layout=layout), device=device)


@implementations(softmax)
@given(x=inputs((4, 33), torch.float32, values=("normal", "holes")))
def test_the_input_is_left_alone(device, impl, x):
    before, after = x.on(device), x.on(device)
    run(impl, after)
    assert torch.equal(before, after)


@implementations(softmax)
def test_a_result_is_not_overwritten_by_the_next_call(device, impl):
    first, second = (Input((3, 70), seed=seed).on(device) for seed in (0, 1))
    result = run(impl, first)
    kept = result.clone()
    run(impl, second)
    assert torch.equal(result, kept) and torch.equal(run(impl, first), kept)


@implementations(softmax, dtypes=True)
def test_empty_in_empty_out(device, impl, dtype):
    for shape in ((0,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (2, 3, 0)):
        check(impl, Input(shape, dtype_name(dtype)), device=device)


@implementations(softmax)
def test_float64_is_exact_or_refused(device, impl):
    if device == "mps":
        pytest.skip("mps has no float64")
    for columns in (1, 70, 1025):
        check(impl, Input((3, columns), "float64"), device=device)


@implementations(softmax)
def test_more_rows_than_a_grid_axis_holds(device, impl):
    check(impl, Input((65_537, 3)), device=device)


@implementations(softmax)
def test_offsets_past_two_billion(device, impl):
    stride = 2**30  # row 2 starts 2^31 elements in
    try:
        buffer = torch.empty(2 * stride + 40, dtype=torch.float16, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for 4.3 GB on {device}: {str(error).splitlines()[0]}")
    x = buffer.as_strided((3, 40), (stride, 1)).copy_(Input((3, 40), "float16").on(device))
    check(impl, x, device=device)


@implementations(softmax, dtypes=True)
def test_new_sizes_compile_nothing_new(device, impl, dtype):
    run(impl, Input((3, 5), dtype_name(dtype)).on(device))
    before = kernels_compiled()
    for shape, layout in itertools.product(((1, 1), (1, 7), (7, 1), (4,), (2, 3, 129), (0, 3)), LAYOUTS):
        run(impl, Input(shape, dtype_name(dtype), layout=layout).on(device))
    assert kernels_compiled() == before


@implementations(softmax, only=lambda impl: impl.name == "compiled")
def test_large_calls_stay_compiled_however_many(device, impl, monkeypatch):
    monkeypatch.setattr(room(impl), "OWN_KERNEL", 1)
    before = kernels_compiled()
    with torch._dynamo.config.patch(recompile_limit=1):  # of 8, past which dynamo gives up
        for columns in (31, 33):
            run(impl, Input((2, columns)).on(device))
    assert kernels_compiled() == before + 2


@implementations(softmax, dtypes=True, only=lambda impl: impl.name == "triton")
@given(
    block=st.sampled_from((16, 64, 256)),
    rows=st.sampled_from((1, 2, 8)),
    stages=st.sampled_from((1, 2, 3)),
    split=st.sampled_from((0, 1, 2)),
    shape=st.tuples(lengths(9), lengths(300)),
    values=st.sampled_from((*VALUES, "holes")),
)
def test_any_cut_of_the_kernel_is_right(device, impl, dtype, block, rows, stages, split, shape, values):
    kernels = room(impl)
    cut = kernels.Cut(block, 4, rows, stages, split).checked()
    with_cut = dataclasses.replace(impl, fn=lambda x: kernels.run(x, cut))
    check(with_cut, Input(shape, dtype_name(dtype), values=values), device=device)


@implementations(softmax, only=is_operator)
def test_torch_finds_the_operator_sound(device, impl):
    for shape in ((3, 70), (0, 5)):
        checks = torch.library.opcheck(
            impl.fn.operator, (Input(shape, "float16").on(device),), raise_exception=False
        )
        assert all(result == "SUCCESS" for result in checks.values()), checks


@implementations(softmax, only=is_operator)
def test_runs_within_a_compiled_program(device, impl):
    x, backend = Input((3, 70)).on(device), "inductor" if device == "cuda" else "aot_eager"
    program = torch.compile(lambda x: impl.fn(x * 2) + 1, fullgraph=True, backend=backend)
    for rows in (3, 2, 1):
        assert torch.equal(program(x[:rows]), impl.fn(x[:rows] * 2) + 1)


@on_devices("cuda")
@pytest.mark.parametrize("impl", list(softmax), ids=lambda impl: impl.name)
@pytest.mark.parametrize("shape", [(64, 4096), (7, 65537)], ids=str)
def test_replays_from_a_cuda_graph(device, impl, shape):
    x = Input(shape, "bfloat16").on(device)
    for _ in range(2):  # compiles, then runs what was compiled
        impl.fn(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = impl.fn(x)
    x.copy_(Input(shape, "bfloat16", seed=1).on(device))
    graph.replay()
    judge(impl, y, (x,), {}, f"a replay of {impl} at {shape}")


BAD = {
    "a list": ([1.0], TypeError, "x: got list"),
    "a scalar": (torch.tensor(1.0), ValueError, "x: got a scalar"),
    "integers": (torch.ones(3, dtype=torch.int64), TypeError, "x: got torch.int64"),
    "bools": (torch.ones(3, dtype=torch.bool), TypeError, "x: got torch.bool"),
}


@implementations(softmax)
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_by_name(device, impl, bad):
    x, error, message = BAD[bad]
    with pytest.raises(error, match=message):
        impl(x)
