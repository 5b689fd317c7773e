"""What a residual addition fused with RMS normalization must never get wrong."""

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
from perf_lab.add_rms_norm import add_rms_norm
from perf_lab.numerics import assert_close, check, judge, poisoned, upcast
from perf_lab.op import Implementation, LimitError
from perf_lab.pytest_plugin import implementations, on_devices
from perf_lab.strategies import LAYOUTS, VALUES, Input, dtype_name, inputs, lengths

# around the edges of blocks, of a row in registers (32768) and of the steps of a longer one (8192)
LENGTHS = (1, 3, 15, 16, 17, 127, 129, 1025, 4095, 4097, 32768, 32769, 65537)
SHAPES = st.one_of(
    st.tuples(lengths(1100)),
    st.tuples(lengths(9), lengths(1100)),
    st.tuples(lengths(3), lengths(4), lengths(300)),
)
IN_RANGE = tuple(values for values in VALUES if values != "huge")  # its squares have no finite sum
EPS = st.sampled_from((1e-6, 1e-5, 1e-8, 1.0))
COLUMNS = lengths(600, smallest=1)
SEEDS = st.integers(0, 99)


def run(
    impl: Implementation, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """(y, s), unchecked, into poisoned memory; what a stated limit keeps out is a visible skip."""
    try:
        with poisoned():
            return impl(x, residual, weight, eps)
    except LimitError as limit:
        pytest.skip(str(limit))


def drawn(shape: tuple[int, ...], seed: int, device: str, dtype: str = "float32") -> tuple[Tensor, ...]:
    """x, residual and weight."""
    parts = (Input(shape, dtype, seed), Input(shape, dtype, seed + 1000), Input(shape[-1:], dtype, seed + 1))
    return tuple(part.on(device) for part in parts)


def kernels_compiled() -> int:
    """How often torch.compile has compiled anything in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def is_operator(impl: Implementation) -> bool:
    """Whether compiled programs call it as one operator."""
    return hasattr(impl.fn, "operator")


def room(impl: Implementation) -> types.ModuleType:
    """The module that holds an implementation of ours."""
    return sys.modules[impl.fn.__module__]


@implementations(add_rms_norm, dtypes=True)
@given(data=st.data())
def test_matches_the_oracle(device, impl, dtype, data):
    shape = data.draw(SHAPES, label="shape")
    x = data.draw(inputs(shape, dtype, values=IN_RANGE), label="x")
    residual = data.draw(inputs(shape, dtype, values=IN_RANGE), label="residual")
    weight_dtype = data.draw(st.sampled_from((dtype, torch.float32)), label="weight dtype")
    weight = data.draw(inputs(shape[-1:], weight_dtype, values=IN_RANGE), label="weight")
    check(impl, x, residual, weight, data.draw(EPS, label="eps"), device=device)


@implementations(add_rms_norm)
def test_any_row_length(device, impl):
    for columns in LENGTHS:
        shape = (1 if columns > 2**15 else 2, columns)
        check(impl, Input(shape), Input(shape, seed=1), Input((columns,), seed=2), device=device)


@implementations(add_rms_norm)  # no bfloat16: the interpreter cuts it off where hardware rounds
@given(columns=COLUMNS, seed=SEEDS, dtype=st.sampled_from(("float32", "float16")))
def test_the_sum_is_the_one_that_torch_gives(device, impl, columns, seed, dtype):
    x, residual, weight = drawn((3, columns), seed, device, dtype)
    assert torch.equal(run(impl, x, residual, weight)[1], x + residual)


@implementations(add_rms_norm)
@given(columns=COLUMNS, seed=SEEDS, wide=st.booleans())
def test_the_result_is_the_norm_of_the_rounded_sum(device, impl, columns, seed, wide):
    x, residual, weight = drawn((3, columns), seed, device, "float16")
    weight = weight.float() if wide else weight
    y, s = run(impl, x, residual, weight)
    w = upcast(s)  # what was returned, not what was added
    should_be = w / (w.square().mean(-1, keepdim=True) + 1e-6).sqrt() * upcast(weight)
    spacing = 2.0 ** (should_be.abs().log2().floor().clamp(min=-14) - 10)
    # half a spacing, and what float32 leaves before it: columns summed pairwise, then five roundings
    float32 = (math.ceil(math.log2(columns + 1)) + 5) * numerics.eps(torch.float32) * should_be.abs()
    call = f"{impl}, {columns}, seed {seed}, {wide}"
    assert_close(y, should_be, spacing / 2 + float32, call)


@implementations(add_rms_norm)
@given(columns=COLUMNS, seed=SEEDS)
def test_x_and_residual_change_places(device, impl, columns, seed):
    x, residual, weight = drawn((3, columns), seed, device)
    one, other = run(impl, x, residual, weight), run(impl, residual, x, weight)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@implementations(add_rms_norm, dtypes=True)
@given(columns=COLUMNS, eps=EPS, row=st.integers(0, 2))
def test_what_cancels_gives_zeros(device, impl, dtype, columns, eps, row):
    x, residual, weight = drawn((3, columns), 5, device, dtype_name(dtype))
    residual[row] = -x[row]
    y, s = run(impl, x, residual, weight, eps)
    assert (s[row] == 0).all() and (y[row] == 0).all() and (y[(row + 1) % 3] != 0).any()


@implementations(add_rms_norm)
@given(columns=COLUMNS, seed=SEEDS, power=st.sampled_from((-6, -2, 1, 5)))
def test_scale_cancels(device, impl, columns, seed, power):
    x, residual, weight = drawn((3, columns), seed, device)
    scaled = run(impl, x * 2.0**power, residual * 2.0**power, weight, 1e-6 * 4.0**power)
    assert torch.equal(scaled[0], run(impl, x, residual, weight)[0])  # powers of two round nothing


@implementations(add_rms_norm)
@given(columns=COLUMNS, place=st.integers(0, 599))
def test_a_weight_acts_on_its_own_column(device, impl, columns, place):
    x, residual, weight = drawn((3, columns), 0, device)
    weight.zero_()[place % columns] = 1
    y, s = run(impl, x, residual, weight)
    assert torch.equal(y != 0, (weight != 0).expand(3, columns)) and torch.equal(s, x + residual)


@implementations(add_rms_norm, dtypes=True)
def test_the_results_have_the_dtype_of_x(device, impl, dtype):
    for weight_dtype in (dtype, torch.float32):
        x, residual, weight = drawn((3, 5), 0, device, dtype_name(dtype))
        y, s = run(impl, x, residual, weight.to(weight_dtype))
        assert y.dtype == s.dtype == dtype


@implementations(add_rms_norm)
@given(
    bad=st.sampled_from((math.inf, -math.inf, math.nan)),
    columns=lengths(300, smallest=1),
    place=st.integers(0, 299),
)
def test_what_is_not_finite_stays_in_its_row(device, impl, bad, columns, place):
    x, residual, weight = drawn((3, columns), 0, device)
    residual[1, place % columns] = bad
    check(impl, x, residual, weight, device=device)


@implementations(add_rms_norm)
@given(shape=st.tuples(lengths(9, smallest=2), lengths(300, smallest=1)), row=st.integers(0, 8))
def test_rows_share_nothing(device, impl, shape, row):
    x, residual, weight = drawn(shape, 0, device)
    others = torch.full_like(x, math.nan)
    row %= shape[0]
    others[row] = x[row]
    got, alone = run(impl, x, residual, weight), run(impl, others, residual, weight)
    assert all(torch.equal(a[row], b[row]) for a, b in zip(got, alone, strict=True))


@implementations(add_rms_norm, dtypes=True)
def test_strides_do_not_matter(device, impl, dtype):
    for shape, layout in itertools.product(((70,), (5, 129), (2, 3, 40)), LAYOUTS):
        x, residual = Input(shape, dtype_name(dtype), layout=layout), Input(shape, dtype_name(dtype), 1)
        weight = Input(shape[-1:], dtype_name(dtype), 2, layout=layout)
        check(impl, x, residual, weight, device=device)
        check(impl, residual, x, weight, device=device)


@implementations(add_rms_norm)
@given(x=inputs((4, 33), torch.float32, values=("normal", "zeros")))
def test_the_inputs_are_left_alone(device, impl, x):
    before = (x.on(device), *drawn((4, 33), 1, device)[1:])
    after = tuple(tensor.clone() for tensor in before)
    results = run(impl, *after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    kept = {tensor.untyped_storage().data_ptr() for tensor in (*after, *results)}
    assert len(kept) == 5  # neither result is a view of anything


@implementations(add_rms_norm)
def test_a_result_is_not_overwritten_by_the_next_call(device, impl):
    first, second = drawn((3, 70), 0, device), drawn((3, 70), 1, device)
    results = run(impl, *first)
    kept = [result.clone() for result in results]
    run(impl, *second)
    assert all(torch.equal(a, b) for a, b in zip(results, kept, strict=True))


@implementations(add_rms_norm, dtypes=True)
def test_empty_in_empty_out(device, impl, dtype):
    for shape in ((0,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (2, 3, 0)):
        x = Input(shape, dtype_name(dtype))
        check(impl, x, x, Input(shape[-1:], dtype_name(dtype)), device=device)


@implementations(add_rms_norm)
def test_float64_is_exact_or_refused(device, impl):
    if device == "mps":
        pytest.skip("mps has no float64")
    for columns in (1, 70, 1025):
        x, residual = Input((3, columns), "float64"), Input((3, columns), "float64", 1)
        check(impl, x, residual, Input((columns,), "float64", 2), device=device)


@implementations(add_rms_norm)
def test_more_rows_than_a_grid_axis_holds(device, impl):
    check(impl, Input((65_537, 3)), Input((65_537, 3), seed=1), Input((3,), seed=2), device=device)


@implementations(add_rms_norm)
def test_offsets_past_two_billion(device, impl):
    stride = 2**30  # row 2 starts 2^31 elements in
    try:
        buffer = torch.empty(2 * stride + 40, dtype=torch.float16, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for 4.3 GB on {device}: {str(error).splitlines()[0]}")
    x = buffer.as_strided((3, 40), (stride, 1)).copy_(Input((3, 40), "float16").on(device))
    near, weight = Input((3, 40), "float16", 2), Input((40,), "float16", 1)
    check(impl, x, near, weight, device=device)
    check(impl, near, x, weight, device=device)


@implementations(add_rms_norm, dtypes=True)
def test_new_sizes_compile_nothing_new(device, impl, dtype):
    def call(shape, layout, eps):
        x = Input(shape, dtype_name(dtype), layout=layout).on(device)
        run(impl, x, x, Input(shape[-1:], dtype_name(dtype), 1).on(device), eps)

    for eps in (1e-6, 1e-5):  # dynamo compiles for a number, and at the second for any
        call((3, 5), "contiguous", eps)
    before = kernels_compiled()
    for shape, layout in itertools.product(((1, 1), (1, 7), (7, 1), (4,), (2, 3, 129), (0, 3)), LAYOUTS):
        call(shape, layout, 1e-4)
    assert kernels_compiled() == before


@implementations(add_rms_norm, dtypes=True, only=lambda impl: impl.name == "triton")
@given(
    block=st.sampled_from((16, 64, 256)),
    rows=st.sampled_from((1, 2, 8)),
    stages=st.sampled_from((1, 2, 3)),
    shape=st.tuples(lengths(9), lengths(300)),
)
def test_any_cut_of_the_kernel_is_right(device, impl, dtype, block, rows, stages, shape):
    kernels = room(impl)
    cut = kernels.Cut(block, 4, rows, stages).checked()
    with_cut = dataclasses.replace(impl, fn=lambda *tensors: kernels.run(*tensors, 1e-6, cut))
    x, residual = Input(shape, dtype_name(dtype)), Input(shape, dtype_name(dtype), 1)
    check(with_cut, x, residual, Input(shape[-1:], dtype_name(dtype), 2), device=device)


@implementations(add_rms_norm, only=is_operator)
def test_torch_finds_the_operator_sound(device, impl):
    for shape in ((3, 70), (0, 5)):
        checks = torch.library.opcheck(
            impl.fn.operator, (*drawn(shape, 0, device, "float16"), 1e-5), raise_exception=False
        )
        assert all(result == "SUCCESS" for result in checks.values()), checks


@implementations(add_rms_norm, only=is_operator)
def test_runs_within_a_compiled_program(device, impl):
    x, residual, weight = drawn((3, 70), 0, device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    program = torch.compile(lambda *t: sum(impl.fn(*t)) + 1, fullgraph=True, backend=backend)
    for rows in (3, 2, 1):
        args = x[:rows], residual[:rows], weight
        assert torch.equal(program(*args), sum(impl.fn(*args)) + 1)


@on_devices("cuda")
@pytest.mark.parametrize("impl", list(add_rms_norm), ids=lambda impl: impl.name)
@pytest.mark.parametrize("shape", [(64, 4096), (7, 65537)], ids=str)
def test_replays_from_a_cuda_graph(device, impl, shape):
    tensors = drawn(shape, 0, device, "bfloat16")
    for _ in range(2):  # compiles, then runs what was compiled
        impl.fn(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = impl.fn(*tensors)
    tensors[0].copy_(Input(shape, "bfloat16", seed=2).on(device))
    graph.replay()
    judge(impl, results, tensors, {}, f"a replay of {impl} at {shape}")


X, W = torch.ones(2, 3), torch.ones(3)
BAD = {
    "x a list": (([1.0], X, W), TypeError, "x: got list"),
    "x a scalar": ((torch.tensor(1.0), X, W), ValueError, "x: got a scalar"),
    "x integers": ((X.long(), X, W), TypeError, "x: got torch.int64"),
    "no residual": ((X, None, W), TypeError, "residual: got NoneType"),
    "residual of another shape": (
        (X, W, W),
        ValueError,
        r"residual: got shape \(3,\), accepted is x's \(2, 3\)",
    ),
    "residual of another dtype": ((X, X.half(), W), TypeError, "residual: got torch.float16"),
    "residual elsewhere": ((X, X.to("meta"), W), ValueError, "residual: got device meta"),
    "weight too short": ((X, X, W[:2]), ValueError, r"weight: got shape \(2,\), accepted is \[C\] = \(3,\)"),
    "weight wider than x": ((X, X, W.double()), TypeError, "weight: got torch.float64"),
    "weight elsewhere": ((X, X, W.to("meta")), ValueError, "weight: got device meta"),
    "eps an int": ((X, X, W, 1), TypeError, "eps: got int"),
    "eps zero": ((X, X, W, 0.0), ValueError, "eps: got 0.0"),
}


@implementations(add_rms_norm)
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_by_name(device, impl, bad):
    args, error, message = BAD[bad]
    with pytest.raises(error, match=message):
        impl(*args)
