"""What an RMS normalization must never get wrong."""

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
from perf_lab.rms_norm import rms_norm
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
IN_RANGE = tuple(values for values in VALUES if values != "huge")  # its squares have no finite sum
EPS = st.sampled_from((1e-6, 1e-5, 1e-8, 1.0))


def run(impl: Implementation, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The result, unchecked, into poisoned memory; what a stated limit keeps out is a visible skip."""
    try:
        with poisoned():
            return impl(x, weight, eps)
    except LimitError as limit:
        pytest.skip(str(limit))


def constant(value: float, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """Two rows of one value [2, C]."""
    return torch.full((2, columns), value, dtype=dtype, device=device)


def kernels_compiled() -> int:
    """How often torch.compile has compiled anything in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def is_operator(impl: Implementation) -> bool:
    """Whether compiled programs call it as one operator."""
    return hasattr(impl.fn, "operator")


def room(impl: Implementation) -> types.ModuleType:
    """The module that holds an implementation of ours."""
    return sys.modules[impl.fn.__module__]


@implementations(rms_norm, dtypes=True)
@given(data=st.data())
def test_matches_the_oracle(device, impl, dtype, data):
    shape = data.draw(SHAPES, label="shape")
    x = data.draw(inputs(shape, dtype, values=IN_RANGE), label="x")
    weight_dtype = data.draw(st.sampled_from((dtype, torch.float32)), label="weight dtype")
    weight = data.draw(inputs(shape[-1:], weight_dtype, values=IN_RANGE), label="weight")
    check(impl, x, weight, data.draw(EPS, label="eps"), device=device)


@implementations(rms_norm)
def test_any_row_length(device, impl):
    for columns in LENGTHS:
        x = Input((1 if columns > 2**16 else 2, columns), seed=columns)
        check(impl, x, Input((columns,), seed=1), device=device)


@implementations(rms_norm, dtypes=True)
@given(
    columns=lengths(4096, smallest=1),
    value=st.sampled_from((300.0, -300.0, 65504.0, 1.0, 1e-3, -1e-4)),
    eps=EPS,
)
def test_a_constant_row_has_a_closed_form(device, impl, dtype, columns, value, eps):
    x = constant(value, columns, dtype, device)
    v = x[0, 0].item()  # as the dtype has it
    y = run(impl, x, torch.ones(columns, dtype=dtype, device=device), eps)
    should_be = torch.full((2, columns), v / math.sqrt(v * v + eps), dtype=torch.float64)
    error = numerics.allowed_error(should_be, None, should_be.abs(), dtype, columns)
    assert_close(y, should_be, error, f"{impl} of {columns} times {value}, eps {eps}")


@implementations(rms_norm, dtypes=True)
@given(columns=lengths(300, smallest=1), eps=EPS, row=st.integers(0, 2))
def test_a_row_of_zeros_gives_zeros(device, impl, dtype, columns, eps, row):
    x = Input((3, columns), dtype_name(dtype)).on(device)
    x[row] = 0
    y = run(impl, x, Input((columns,), dtype_name(dtype), 1).on(device), eps)
    assert (y[row] == 0).all() and (y[(row + 1) % 3] != 0).all()


@implementations(rms_norm)
@given(columns=lengths(600, smallest=1), seed=st.integers(0, 99), power=st.sampled_from((-6, -2, 1, 5)))
def test_scale_cancels(device, impl, columns, seed, power):
    x, weight = Input((3, columns), seed=seed).on(device), Input((columns,), seed=1).on(device)
    scaled = run(impl, x * 2.0**power, weight, 1e-6 * 4.0**power)
    assert torch.equal(scaled, run(impl, x, weight, 1e-6))  # powers of two round nothing


@implementations(rms_norm)
@given(
    columns=lengths(600, smallest=1), seed=st.integers(0, 99), factor=st.sampled_from((0.0, 0.5, -1.0, 4.0))
)
def test_the_result_is_linear_in_the_weight(device, impl, columns, seed, factor):
    x, weight = Input((3, columns), seed=seed).on(device), Input((columns,), seed=1).on(device)
    assert torch.equal(run(impl, x, factor * weight), factor * run(impl, x, weight))


@implementations(rms_norm)
@given(columns=lengths(600, smallest=1), place=st.integers(0, 599))
def test_a_weight_acts_on_its_own_column(device, impl, columns, place):
    weight = torch.zeros(columns, device=device)
    weight[place % columns] = 1
    y = run(impl, Input((3, columns)).on(device), weight)
    assert torch.equal(y != 0, (weight != 0).expand(3, columns))


@implementations(rms_norm)  # float16 only: the interpreter cuts bfloat16 off where hardware rounds
@given(columns=lengths(600, smallest=1), seed=st.integers(0, 99), wide=st.booleans())
def test_rounds_once(device, impl, columns, seed, wide):
    x = Input((3, columns), "float16", seed).on(device)
    weight = Input((columns,), "float32" if wide else "float16", 1).on(device)
    should_be = rms_norm.oracle(upcast(x), upcast(weight), 1e-6)
    spacing = 2.0 ** (should_be.abs().log2().floor().clamp(min=-14) - 10)
    # half a spacing, and what float32 leaves before it: columns summed pairwise, then five roundings
    float32 = (math.ceil(math.log2(columns + 1)) + 5) * numerics.eps(torch.float32) * should_be.abs()
    assert_close(
        run(impl, x, weight), should_be, spacing / 2 + float32, f"{impl}, {columns}, seed {seed}, {wide}"
    )


@implementations(rms_norm, dtypes=True)
def test_the_result_has_the_dtype_of_x(device, impl, dtype):
    for weight_dtype in (dtype, torch.float32):
        weight = torch.ones(5, dtype=weight_dtype, device=device)
        assert run(impl, Input((3, 5), dtype_name(dtype)).on(device), weight).dtype == dtype


@implementations(rms_norm)
@given(
    bad=st.sampled_from((math.inf, -math.inf, math.nan)),
    columns=lengths(300, smallest=1),
    place=st.integers(0, 299),
)
def test_what_is_not_finite_stays_in_its_row(device, impl, bad, columns, place):
    x = Input((3, columns)).on(device)
    x[1, place % columns] = bad
    check(impl, x, Input((columns,), seed=1), device=device)


@implementations(rms_norm)
@given(shape=st.tuples(lengths(9, smallest=2), lengths(300, smallest=1)), row=st.integers(0, 8))
def test_rows_share_nothing(device, impl, shape, row):
    x, weight = Input(shape).on(device), Input(shape[-1:], seed=1).on(device)
    others = torch.full_like(x, math.nan)
    row %= shape[0]
    others[row] = x[row]
    assert torch.equal(run(impl, x, weight)[row], run(impl, others, weight)[row])


@implementations(rms_norm, dtypes=True)
def test_strides_do_not_matter(device, impl, dtype):
    for shape, layout in itertools.product(((70,), (5, 129), (2, 3, 40)), LAYOUTS):
        x = Input(shape, dtype_name(dtype), layout=layout)
        check(impl, x, Input(shape[-1:], dtype_name(dtype), 1, layout=layout), device=device)


@implementations(rms_norm)
@given(x=inputs((4, 33), torch.float32, values=("normal", "zeros")))
def test_the_input_is_left_alone(device, impl, x):
    weight = Input((33,), seed=1)
    before, after = (x.on(device), weight.on(device)), (x.on(device), weight.on(device))
    run(impl, *after)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


@implementations(rms_norm)
def test_a_result_is_not_overwritten_by_the_next_call(device, impl):
    first, second = (Input((3, 70), seed=seed).on(device) for seed in (0, 1))
    weight = torch.ones(70, device=device)
    result = run(impl, first, weight)
    kept = result.clone()
    run(impl, second, weight)
    assert torch.equal(result, kept) and torch.equal(run(impl, first, weight), kept)


@implementations(rms_norm, dtypes=True)
def test_empty_in_empty_out(device, impl, dtype):
    for shape in ((0,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (2, 3, 0)):
        check(impl, Input(shape, dtype_name(dtype)), Input(shape[-1:], dtype_name(dtype)), device=device)


@implementations(rms_norm)
def test_float64_is_exact_or_refused(device, impl):
    if device == "mps":
        pytest.skip("mps has no float64")
    for columns in (1, 70, 1025):
        check(impl, Input((3, columns), "float64"), Input((columns,), "float64", 1), device=device)


@implementations(rms_norm)
def test_more_rows_than_a_grid_axis_holds(device, impl):
    check(impl, Input((65_537, 3)), Input((3,), seed=1), device=device)


@implementations(rms_norm)
def test_offsets_past_two_billion(device, impl):
    stride = 2**30  # row 2 starts 2^31 elements in
    try:
        buffer = torch.empty(2 * stride + 40, dtype=torch.float16, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for 4.3 GB on {device}: {str(error).splitlines()[0]}")
    x = buffer.as_strided((3, 40), (stride, 1)).copy_(Input((3, 40), "float16").on(device))
    check(impl, x, Input((40,), "float16", 1), device=device)


@implementations(rms_norm, dtypes=True)
def test_new_sizes_compile_nothing_new(device, impl, dtype):
    def call(shape, layout, eps):
        x, weight = Input(shape, dtype_name(dtype), layout=layout), Input(shape[-1:], dtype_name(dtype), 1)
        run(impl, x.on(device), weight.on(device), eps)

    for eps in (1e-6, 1e-5):  # dynamo compiles for a number, and at the second for any
        call((3, 5), "contiguous", eps)
    before = kernels_compiled()
    for shape, layout in itertools.product(((1, 1), (1, 7), (7, 1), (4,), (2, 3, 129), (0, 3)), LAYOUTS):
        call(shape, layout, 1e-4)
    assert kernels_compiled() == before


@implementations(rms_norm, only=lambda impl: impl.name == "compiled")
def test_large_calls_stay_compiled_however_many(device, impl, monkeypatch):
    monkeypatch.setattr(room(impl), "OWN_KERNEL", 1)
    before = kernels_compiled()
    with torch._dynamo.config.patch(recompile_limit=1):  # of 8, past which dynamo gives up
        for columns in (31, 33):
            run(impl, Input((2, columns)).on(device), Input((columns,), seed=1).on(device))
    assert kernels_compiled() == before + 2


@implementations(rms_norm, dtypes=True, only=lambda impl: impl.name == "triton")
@given(
    block=st.sampled_from((16, 64, 256)),
    rows=st.sampled_from((1, 2, 8)),
    stages=st.sampled_from((1, 2, 3)),
    shape=st.tuples(lengths(9), lengths(300)),
    values=st.sampled_from(IN_RANGE),
)
def test_any_cut_of_the_kernel_is_right(device, impl, dtype, block, rows, stages, shape, values):
    kernels = room(impl)
    cut = kernels.Cut(block, 4, rows, stages).checked()
    with_cut = dataclasses.replace(impl, fn=lambda x, weight: kernels.run(x, weight, 1e-6, cut))
    x, weight = Input(shape, dtype_name(dtype), values=values), Input(shape[-1:], dtype_name(dtype), 1)
    check(with_cut, x, weight, device=device)


@implementations(rms_norm, only=is_operator)
def test_torch_finds_the_operator_sound(device, impl):
    for shape in ((3, 70), (0, 5)):
        x, weight = Input(shape, "float16").on(device), Input(shape[-1:]).on(device)
        checks = torch.library.opcheck(impl.fn.operator, (x, weight, 1e-5), raise_exception=False)
        assert all(result == "SUCCESS" for result in checks.values()), checks


@implementations(rms_norm, only=is_operator)
def test_runs_within_a_compiled_program(device, impl):
    x, weight = Input((3, 70)).on(device), Input((70,), seed=1).on(device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    program = torch.compile(lambda x, weight: impl.fn(x * 2, weight) + 1, fullgraph=True, backend=backend)
    for rows in (3, 2, 1):
        assert torch.equal(program(x[:rows], weight), impl.fn(x[:rows] * 2, weight) + 1)


@on_devices("cuda")
@pytest.mark.parametrize("impl", list(rms_norm), ids=lambda impl: impl.name)
@pytest.mark.parametrize("shape", [(64, 4096), (7, 65537)], ids=str)
def test_replays_from_a_cuda_graph(device, impl, shape):
    x, weight = Input(shape, "bfloat16").on(device), Input(shape[-1:], "bfloat16", 1).on(device)
    for _ in range(2):  # compiles, then runs what was compiled
        impl.fn(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = impl.fn(x, weight)
    x.copy_(Input(shape, "bfloat16", seed=2).on(device))
    graph.replay()
    judge(impl, y, (x, weight), {}, f"a replay of {impl} at {shape}")


X, W = torch.ones(2, 3), torch.ones(3)
BAD = {
    "x a list": (([1.0], W), TypeError, "x: got list"),
    "x a scalar": ((torch.tensor(1.0), W), ValueError, "x: got a scalar"),
    "x integers": ((X.long(), W), TypeError, "x: got torch.int64"),
    "no weight": ((X, None), TypeError, "weight: got NoneType"),
    "weight too short": ((X, W[:2]), ValueError, r"weight: got shape \(2,\), accepted is \[C\] = \(3,\)"),
    "weight a matrix": ((X, X), ValueError, r"weight: got shape \(2, 3\)"),
    "weight wider than x": ((X, W.double()), TypeError, "weight: got torch.float64"),
    "weight elsewhere": ((X, W.to("meta")), ValueError, "weight: got device meta"),
    "eps an int": ((X, W, 1), TypeError, "eps: got int"),
    "eps zero": ((X, W, 0.0), ValueError, "eps: got 0.0"),
    "eps negative": ((X, W, -1e-6), ValueError, "eps: got -1e-06"),
    "eps nan": ((X, W, math.nan), ValueError, "eps: got nan"),
    "eps infinite": ((X, W, math.inf), ValueError, "eps: got inf"),
}


@implementations(rms_norm)
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_by_name(device, impl, bad):
    args, error, message = BAD[bad]
    with pytest.raises(error, match=message):
        impl(*args)
