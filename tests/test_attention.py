"""What an attention must never get wrong."""

import dataclasses
import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from perf_lab.attention import attention
from perf_lab.numerics import build, check, judge, within_limits
from perf_lab.op import FLOATS
from perf_lab.pytest_plugin import implementations
from perf_lab.strategies import LAYOUTS, Input, dtype_name, inputs, lengths

VALUES = ("normal", "zeros", "ties", "denormal", "negative")
HEAD_DIMS = st.sampled_from((1, 8, 63, 64, 65, 80, 128)) | st.integers(1, 160)
ROWS = st.integers(1, 3)
FEW_ROWS = st.integers(2, 4)
OWN_MEMORY = tuple(layout for layout in LAYOUTS if layout != "expanded")
FLOAT32 = FLOATS[0]


@st.composite
def tensors(draw, dtype, longest=70, rows=ROWS, layouts=LAYOUTS, dims=HEAD_DIMS, slow=False):
    """q, k, v of any lengths, grouping, values and layout. slow: of fewer and smaller ones."""
    if slow:
        longest, rows = longest // 2, st.just(2) if rows is FEW_ROWS else st.integers(1, 2)
    B, Hkv, group, D = draw(rows), draw(st.integers(1, 2)), draw(st.integers(1, 2 if slow else 3)), draw(dims)
    Tq, Tk = draw(lengths(longest)), draw(lengths(longest))
    Dv = draw(st.just(D) | st.integers(1, 160))
    shapes = (B, Hkv * group, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv)
    return tuple(draw(inputs(shape, dtype, VALUES, layouts)) for shape in shapes)


@st.composite
def rules(draw, q, k, masks=True, ragged=True):
    """Everything else that an attention can be asked: causal, window, scale, mask, lengths."""
    (B, Hq, Tq, _), Tk = q.shape, k.shape[2]
    asked = draw(
        st.sampled_from(({}, {"causal": True}, {"causal": True, "window": draw(lengths(Tk + 3, 1))}))
    )
    if draw(st.booleans()):
        asked["scale"] = draw(st.floats(0.01, 1))
    if masks and draw(st.booleans()):
        shape = [draw(st.sampled_from((1, n))) for n in (B, Hq, Tq, Tk)][draw(st.integers(0, 3)) :]
        dtype = draw(st.sampled_from(("bool", q.dtype)))
        asked["mask"] = draw(
            st.builds(Input, st.just(tuple(shape)), st.just(dtype), st.integers(0, 99), st.just("holes"))
        )
    if ragged and draw(st.booleans()):
        counts = torch.tensor([draw(lengths(Tk)) for _ in range(B)])
        one_for_all = B > 0 and draw(st.booleans())  # an expanded view, as a decode loop gives it
        asked["lengths"] = counts[:1].expand(B) if one_for_all else counts
    return asked


def with_slack(impl, filler):
    """The implementation, called with `filler` in every key and value that does not exist."""

    def fn(q, k, v, *, lengths, **how):
        slack = (torch.arange(k.shape[2], device=k.device) >= lengths.to(k.device)[:, None])[:, None, :, None]
        return impl.fn(q, k.masked_fill(slack, filler), v.masked_fill(slack, filler), lengths=lengths, **how)

    return dataclasses.replace(impl, fn=fn)


def takes_chunk(impl):
    return "chunk" in inspect.signature(impl.fn).parameters


@implementations(attention, dtypes=True)
@given(data=st.data())
def test_every_case_matches_the_oracle(device, impl, dtype, data):
    q, k, v = data.draw(tensors(dtype, slow=impl.slow_on(device)), label="q, k, v")
    check(impl, q, k, v, device=device, **data.draw(rules(q, k), label="how"))


@implementations(attention, dtypes=True)
@given(
    data=st.data(),
    D=st.integers(1, 160),
    block=st.sampled_from((16, 32, 64, 128, 512)),
    off=st.integers(-1, 1),
)
def test_any_head_dim_and_block_edge_matches_the_oracle(device, impl, dtype, data, D, block, off):
    q = data.draw(inputs((1, 2, 3, D), dtype, ("normal",)), label="q")
    k, v = (data.draw(inputs((1, 2, block + off, D), dtype, ("normal",)), label=x) for x in "kv")
    check(impl, q, k, v, causal=True, device=device)


@implementations(attention)
@given(data=st.data(), dtype=st.sampled_from(FLOATS), Tk=st.sampled_from((1, 33, 65)))
def test_views_give_what_their_copies_give(device, impl, data, dtype, Tk):
    q, k, v = (
        data.draw(inputs((2, 4, T, 64), dtype, ("normal",), LAYOUTS[1:]), label=name)
        for name, T in (("q", 5), ("k", Tk), ("v", Tk))
    )
    check(impl, q, k, v, causal=True, device=device)


@implementations(attention, dtypes=True)
@given(data=st.data(), block=lengths(40, 1))
@within_limits
def test_any_split_of_the_queries_gives_the_one_shot(device, impl, dtype, data, block):
    """Prefill in blocks: each sees the keys up to its own end."""
    q, k, v = (
        build(x, device)
        for x in data.draw(tensors(dtype, longest=100, slow=impl.slow_on(device)), label="q, k, v")
    )
    how = data.draw(rules(q, k, masks=False, ragged=False), label="how") | {"causal": True}
    Tq, Tk = q.shape[2], k.shape[2]
    parts = []
    block = max(block, Tq // 3) if impl.slow_on(device) else block
    for start in range(0, Tq, block):
        stop = min(start + block, Tq)
        end = max(0, Tk - Tq + stop)
        parts.append(impl(q[:, :, start:stop], k[:, :, :end], v[:, :, :end], **how))
    whole = torch.cat(parts, 2) if parts else impl(q, k, v, **how)
    judge(impl, whole, (q, k, v), how, f"the queries in blocks of {block}")


@implementations(attention, dtypes=True)
@given(data=st.data(), seed=st.integers(0, 99))
@within_limits
def test_future_tokens_do_not_leak(device, impl, dtype, data, seed):
    """Other numbers in the keys from `now` on leave every earlier query as it was, bit for bit:
    they are weighted with an exact 0.
    """
    q, k, v = data.draw(tensors(dtype, layouts=OWN_MEMORY, slow=impl.slow_on(device)), label="q, k, v")
    how = data.draw(rules(q, k, masks=False, ragged=False), label="how") | {"causal": True}
    Tq, Tk = q.shape[2], k.shape[2]
    now = data.draw(st.integers(0, Tk), label="now")
    before = max(0, now - (Tk - Tq))
    q, k, v = (build(x, device) for x in (q, k, v))
    first = impl(q, k, v, **how)
    for x in (k, v):
        x[:, :, now:] *= seed - 50
    assert torch.equal(impl(q, k, v, **how)[:, :, :before], first[:, :, :before])


@implementations(attention, dtypes=True)
@given(data=st.data(), filler=st.sampled_from((math.nan, math.inf, -math.inf, 1.0)))
def test_slack_never_reaches_the_output(device, impl, dtype, data, filler):
    q, k, v = data.draw(tensors(dtype, rows=FEW_ROWS, slow=impl.slow_on(device)), label="q, k, v")
    how = data.draw(rules(q, k), label="how")
    how["lengths"] = torch.tensor([data.draw(lengths(k.shape[2]), label="length") for _ in range(k.shape[0])])
    check(with_slack(impl, filler), q, k, v, device=device, **how)


@implementations(attention)
@given(data=st.data())
@within_limits
def test_a_ragged_row_is_that_row_alone(device, impl, data):
    drawn = data.draw(tensors(FLOAT32, rows=FEW_ROWS, slow=impl.slow_on(device)), label="q, k, v")
    q, k, v = (build(x, device) for x in drawn)
    how = data.draw(rules(q, k, masks=False, ragged=False), label="how")
    counts = [data.draw(lengths(k.shape[2]), label="length") for _ in range(len(q))]
    got = impl(q, k, v, lengths=torch.tensor(counts), **how)
    for b, n in enumerate(counts):
        row = slice(b, b + 1)
        judge(impl, got[row], (q[row], k[row, :, :n], v[row, :, :n]), how, f"row {b} of lengths={counts}")


NOTHING = {
    "causal with more queries than keys": ((7, 3), {"causal": True}, lambda b, i: i < 4),
    "a row without keys": ((5, 4), {"lengths": torch.tensor([0, 4])}, lambda b, i: b == 0),
    "causal in a short row": (
        (5, 6),
        {"causal": True, "lengths": torch.tensor([2, 5])},
        lambda b, i: b == 0 and i < 3,
    ),
    "a bool mask of False": ((4, 4), {"mask": torch.arange(4)[:, None] != 2}, lambda b, i: i == 2),
    "a mask of -inf": (
        (4, 4),
        {"mask": torch.zeros(4, 1).index_fill(0, torch.tensor([1]), -math.inf)},
        lambda b, i: i == 1,
    ),
    "one query under a mask": (
        (1, 4),
        {"mask": torch.zeros(4, dtype=torch.bool), "causal": True},
        lambda b, i: True,
    ),
    "a mask that hides the whole window": (
        (6, 6),
        {"causal": True, "window": 2, "mask": torch.arange(6) > 3},
        lambda b, i: i < 4,
    ),
}


@implementations(attention)
@given(case=st.sampled_from(sorted(NOTHING)))
def test_a_query_that_sees_nothing_gets_zeros(device, impl, case):
    (Tq, Tk), how, blind = NOTHING[case]
    got = check(
        impl,
        Input((2, 4, Tq, 8)),
        Input((2, 2, Tk, 8), seed=1),
        Input((2, 2, Tk, 8), seed=2),
        device=device,
        **how,
    )
    if got is not None:
        zeros = (got == 0).all(3).all(1).tolist()  # [B, Tq]
        assert zeros == [[blind(b, i) for i in range(Tq)] for b in range(2)]


@implementations(attention, dtypes=True)
@given(seed=st.integers(0, 99), causal=st.booleans())
def test_a_row_of_the_lowest_number_is_softmax_and_not_nothing(device, impl, dtype, seed, causal):
    mask = torch.zeros(5, 6, dtype=dtype)
    mask[seed % 5] = torch.finfo(dtype).min
    q, k, v = (Input((2, 2, T, 16), dtype_name(dtype), seed + T) for T in (5, 6, 6))
    check(impl, q, k, v, mask=mask, causal=causal, device=device)


LARGE = (64, 32.0), (128, 32.0), (160, 32.0), (64, 128.0)  # head dim D, size of q's and k's elements


@implementations(attention, dtypes=True)
@given(large=st.sampled_from(LARGE), seed=st.integers(0, 99), causal=st.booleans())
def test_scores_beyond_float16_are_finite_and_right(device, impl, dtype, large, seed, causal):
    """Raw scores of D * size^2 pass 65504; scaled, most of them fit. Keys of few turned signs tie or lose."""
    D, size = large
    g = torch.Generator().manual_seed(seed)
    turned = torch.arange(D) < torch.randint(0, 3, (1, 2, 9, 1), generator=g)
    q = torch.full((1, 2, 9, D), size, dtype=dtype)
    k = torch.where(turned, -size, size).to(dtype)
    check(impl, q, k, Input((1, 2, 9, D), dtype_name(dtype), seed), causal=causal, device=device)


@implementations(attention, dtypes=True)
@given(Hkv=st.integers(2, 5), group=st.integers(2, 5), Tq=lengths(9, 1), causal=st.booleans())
@within_limits
def test_grouped_heads_are_interleaved(device, impl, dtype, Hkv, group, Tq, causal):
    """Where the values of KV head g are all g, query head h must give h // group."""
    k = build(Input((1, Hkv, 9, 16), dtype_name(dtype)), device)
    v = torch.arange(Hkv, device=device).to(dtype)[None, :, None, None].expand(k.shape)
    got = impl(build(Input((1, Hkv * group, Tq, 16), dtype_name(dtype)), device), k, v, causal=causal)
    heads = torch.arange(Hkv * group, device=device) // group
    assert torch.equal(got.round(), heads.to(dtype)[None, :, None, None].expand(got.shape))


@implementations(attention, dtypes=True)
@given(T=lengths(70, 1), behind=lengths(20), window=lengths(80, 1))
@within_limits
def test_a_window_counts_the_current_token(device, impl, dtype, T, behind, window):
    """Keys of zero weigh the same, and values that are unit vectors show which keys got weight."""
    Tk = T + behind
    k = torch.zeros(1, 1, Tk, 8, dtype=dtype, device=device)
    v = torch.eye(Tk, dtype=dtype, device=device)[None, None]
    seen = (
        impl(build(Input((1, 1, T, 8), dtype_name(dtype)), device), k, v, causal=True, window=window)[0, 0]
        > 0
    )
    position = torch.arange(T) + behind
    assert seen.sum(1).tolist() == (position + 1).clamp(max=window).tolist()
    assert seen[torch.arange(T), position].all()


@implementations(attention, only=takes_chunk)
@given(data=st.data(), chunk=lengths(220, 1))
def test_any_chunk_size_gives_the_naive_result(device, impl, data, chunk):
    """Norm-wise within 1e-4: the bar set for chunking in float32."""
    q, k, v = data.draw(tensors(FLOAT32), label="q, k, v")
    how = {key: build(value, device) for key, value in data.draw(rules(q, k), label="how").items()}
    q, k, v = (build(x, device) for x in (q, k, v))
    naive = attention["naive"](q, k, v, **how)
    assert (impl(q, k, v, chunk=chunk, **how) - naive).norm() <= 1e-4 * naive.norm()


@implementations(attention, dtypes=True, only=takes_chunk)
@given(data=st.data(), chunk=lengths(220, 1))
def test_any_chunk_size_matches_the_oracle(device, impl, dtype, data, chunk):
    q, k, v = data.draw(tensors(dtype, slow=impl.slow_on(device)), label="q, k, v")
    check(impl, q, k, v, device=device, chunk=chunk, **data.draw(rules(q, k), label="how"))


@implementations(attention, only=takes_chunk)
@pytest.mark.parametrize("chunk", [0, -1, 2.0])
def test_a_chunk_below_one_is_refused(device, impl, chunk):
    q = torch.zeros(1, 1, 2, 4, device=device)
    with pytest.raises(ValueError, match=f"chunk: got {chunk}"):
        impl(q, q, q, chunk=chunk)


class Largest(TorchDispatchMode):
    """Notes the most elements that any operation within it put out in one tensor."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor):
                self.elements = max(self.elements, made.numel())
        return out


@implementations(attention)
@given(causal=st.booleans())
@within_limits
def test_memory_grows_with_the_length_not_its_square(device, impl, causal):
    def largest(T):
        q, k, v = (Input((1, heads, T, 8), seed=heads).on(device) for heads in (2, 1, 1))
        with Largest() as largest:
            impl(q, k, v, causal=causal)
        return largest.elements

    T = 512 if impl.slow_on(device) else 2048
    assert largest(T) <= 4 * largest(T // 4)


GRIDS = (
    (65535, 1, 1),
    (65536, 1, 2),
    (1, 65535, 1),
    (1, 65536, 1),
    (1, 32768, 2),
    (1, 1, 65536),
    (256, 256, 1),
)


@implementations(attention)
@given(grid=st.sampled_from(GRIDS))
@within_limits
def test_more_heads_or_rows_than_a_grid_axis_takes(device, impl, grid):
    """The weight of an only key is exactly 1, so the output is its value, here a small whole number."""
    B, Hkv, group = grid
    q = Input((B, Hkv * group, 1, 8)).on(device)
    k, v = (Input((B, Hkv, 1, 8), seed=seed, values="ties").on(device) for seed in (1, 2))
    assert torch.equal(impl(q, k, v, causal=True), v.repeat_interleave(group, 1))


@implementations(attention)
def test_offsets_past_int32_reach_the_right_keys(device, impl):
    """The second row of k and v lies 2^31 elements after the first; only the pages written are touched."""
    memory = torch.empty(2**31 + 2**12, dtype=torch.float16, device=device)
    k, v = (memory[at:].as_strided((2, 2, 8, 64), (2**31, 512, 64, 1)) for at in (0, 1024))
    for seed, x in enumerate((k, v)):
        x.copy_(Input(tuple(x.shape), "float16", seed).on(device))
    check(impl, Input((2, 4, 8, 64), "float16", 2), k, v, causal=True, device=device)


EMPTY = {
    "no rows": ((0, 4, 3, 8), (0, 2, 5, 8), 8),
    "no heads": ((2, 0, 3, 8), (2, 0, 5, 8), 8),
    "no queries": ((2, 4, 0, 8), (2, 2, 5, 8), 8),
    "no keys": ((2, 4, 3, 8), (2, 2, 0, 8), 8),
    "no value dim": ((2, 4, 3, 8), (2, 2, 5, 8), 0),
}


@implementations(attention)
@given(case=st.sampled_from(sorted(EMPTY)), how=st.sampled_from(("causal", "mask", "lengths")))
def test_empty_inputs_give_empty_or_zero_outputs(device, impl, case, how):
    q, k, Dv = EMPTY[case]
    asked = {
        "causal": {"causal": True, "window": 2},
        "mask": {"mask": Input((1, q[2], k[2]), "bool", values="holes")},
        "lengths": {"lengths": torch.full(q[:1], k[2]), "causal": True},
    }[how]
    got = check(impl, Input(q), Input(k), Input((*k[:3], Dv)), device=device, **asked)
    assert got is None or (got.shape == (*q[:3], Dv) and not got.any())


BAD = {
    "q is a list": ({"q": [1.0]}, TypeError, "q: got list"),
    "k has 3 axes": ({"k": torch.zeros(2, 5, 8)}, ValueError, r"k: got shape \(2, 5, 8\)"),
    "integers": ({"q": torch.zeros(2, 4, 3, 8, dtype=torch.int32)}, TypeError, "q: got torch.int32"),
    "two dtypes": ({"v": torch.zeros(2, 2, 5, 8, dtype=torch.float16)}, ValueError, "v: got torch.float16"),
    "two devices": ({"v": torch.zeros(2, 2, 5, 8, device="meta")}, ValueError, "v: got .* on meta"),
    "other batch": ({"k": torch.zeros(1, 2, 5, 8)}, ValueError, r"k: got shape \(1, 2, 5, 8\)"),
    "other head dim": ({"k": torch.zeros(2, 2, 5, 9)}, ValueError, r"k: got shape \(2, 2, 5, 9\)"),
    "v of other length": ({"v": torch.zeros(2, 2, 6, 8)}, ValueError, r"v: got shape \(2, 2, 6, 8\)"),
    "heads that do not divide": ({"q": torch.zeros(2, 3, 3, 8)}, ValueError, "q: got 3 heads"),
    "no head dim": (
        {"q": torch.zeros(2, 4, 3, 0), "k": torch.zeros(2, 2, 5, 0)},
        ValueError,
        "q: got head dim 0",
    ),
    "causal a tensor": ({"causal": torch.ones(1)}, TypeError, "causal: got"),
    "scale zero": ({"scale": 0.0}, ValueError, "scale: got 0.0"),
    "scale negative": ({"scale": -1.0}, ValueError, "scale: got -1.0"),
    "scale NaN": ({"scale": math.nan}, ValueError, "scale: got nan"),
    "window zero": ({"window": 0, "causal": True}, ValueError, "window: got 0"),
    "window a float": ({"window": 2.0, "causal": True}, ValueError, "window: got 2.0"),
    "window not causal": ({"window": 2}, ValueError, "window: got 2 with causal=False"),
    "mask a list": ({"mask": [True]}, TypeError, "mask: got list"),
    "mask of integers": ({"mask": torch.ones(3, 5, dtype=torch.int64)}, TypeError, "mask: got torch.int64"),
    "mask of another float": ({"mask": torch.zeros(3, 5).double()}, TypeError, "mask: got torch.float64"),
    "mask of wrong shape": ({"mask": torch.zeros(3, 4)}, ValueError, r"mask: got shape \(3, 4\)"),
    "mask of 5 axes": ({"mask": torch.zeros(1, 1, 1, 3, 5)}, ValueError, "mask: got shape"),
    "lengths a list": ({"lengths": [5, 5]}, TypeError, "lengths: got list"),
    "lengths of floats": ({"lengths": torch.ones(2)}, TypeError, "lengths: got torch.float32"),
    "lengths of wrong shape": (
        {"lengths": torch.ones(3, dtype=torch.int64)},
        ValueError,
        r"lengths: got shape \(3,\)",
    ),
    "lengths too long": ({"lengths": torch.tensor([5, 6])}, ValueError, r"lengths: got \[5, 6\]"),
    "lengths negative": ({"lengths": torch.tensor([-1, 5])}, ValueError, r"lengths: got \[-1, 5\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case):
    change, error, message = BAD[case]
    good = {"q": torch.zeros(2, 4, 3, 8), "k": torch.zeros(2, 2, 5, 8), "v": torch.zeros(2, 2, 5, 8)}
    attention.validate(**good)
    with pytest.raises(error, match=f"^{message}.*accepted"):
        attention.validate(**(good | change))


@implementations(attention)
def test_every_implementation_refuses_bad_input(device, impl):
    q, k = (Input((2, heads, T, 8), "float16").on(device) for heads, T in ((3, 3), (2, 5)))
    with pytest.raises(ValueError, match="q: got 3 heads, accepted are multiples of the 2 heads of k"):
        impl(q, k, k)
    with pytest.raises(TypeError, match="casual"):
        impl.fn(k, k, k, casual=True)


class Kernels(TorchDispatchMode):
    """Notes every operation within it that is not a view."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any(result.alias_info for result in func._schema.returns):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


ONE_KERNEL = (1, 1, None), (1, 70, None), (1, 70, 8), (70, 70, None), (70, 70, 70)  # Tq, Tk, window


@implementations(attention, only=lambda impl: impl.name == "sdpa")
@given(call=st.sampled_from(ONE_KERNEL))
def test_decoding_and_prefill_are_one_kernel(device, impl, call):
    """What a model's loop calls builds no mask and copies nothing."""
    Tq, Tk, window = call
    q, k, v = (Input((2, 4, T, 64)).on(device) for T in (Tq, Tk, Tk))
    with Kernels() as kernels:
        impl(q, k, v, causal=True, window=window)
    assert len(kernels.names) == 1 and "scaled_dot_product" in kernels.names[0]


@given(data=st.data())
def test_the_cost_counts_the_pairs_that_see_each_other(data):
    q, k, v = data.draw(tensors(torch.float64, longest=40), label="q, k, v")
    how = {key: build(value, "cpu") for key, value in data.draw(rules(q, k), label="how").items()}
    q, k, v = (build(x, "cpu") for x in (q, k, v))
    weights = attention.oracle(
        q, 0 * k, torch.eye(k.shape[2]).double().expand(*k.shape[:3], k.shape[2]), **how
    )
    assert attention.cost(q, k, v, **how).flops == 2 * (q.shape[3] + v.shape[3]) * int((weights > 0).sum())


@given(data=st.data())
def test_the_oracle_agrees_with_the_formula_written_per_element(data):
    """The oracle itself, on small inputs, against sums over single queries and keys in plain Python."""
    q, k, v = data.draw(tensors(torch.float64, longest=5, dims=st.integers(1, 4)), label="q, k, v")
    how = {key: build(value, "cpu") for key, value in data.draw(rules(q, k), label="how").items()}
    q, k, v = (build(x, "cpu") for x in (q, k, v))
    got, size = attention.oracle(q, k, v, **how), attention.magnitude(q, k, v, **how)
    for b, h, i in (
        (b, h, i) for b in range(q.shape[0]) for h in range(q.shape[1]) for i in range(q.shape[2])
    ):
        difference = (got[b, h, i] - one_query(q, k, v, b, h, i, **how)).abs()
        assert (
            difference <= 1e-12 * size[b, h, i] + 1e-300
        ).all()  # some thousand roundings of what is summed


def one_query(q, k, v, b, h, i, causal=False, window=None, scale=None, mask=None, lengths=None):
    n = k.shape[2] if lengths is None else int(lengths[b])
    position, head = i + n - q.shape[2], h * k.shape[1] // q.shape[1]
    weights = {}
    for j in range(n):
        if (causal and j > position) or (window is not None and position - j >= window):
            continue
        added = 0.0
        if mask is not None:
            entry = mask.broadcast_to(*q.shape[:3], k.shape[2])[b, h, i, j].item()
            added = entry if mask.is_floating_point() else (0.0 if entry else -math.inf)
        score = sum(a * c for a, c in zip(q[b, h, i].tolist(), k[b, head, j].tolist(), strict=True))
        weights[j] = math.exp(score * (q.shape[3] ** -0.5 if scale is None else scale) + added)
    total = sum(weights.values())
    out = torch.zeros(v.shape[3], dtype=v.dtype)
    for j, weight in weights.items() if total else ():
        out += weight / total * v[b, head, j]
    return out
