"""What attention through block tables must never get wrong, and writing through them."""

import inspect
import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perf_lab.attention import attention
from perf_lab.model.transformer import rotate
from perf_lab.numerics import build, check, eps, judge, poisoned
from perf_lab.op import FLOATS, Cost
from perf_lab.paged_attention import paged_attention, paged_turn, paged_write
from perf_lab.pytest_plugin import implementations
from perf_lab.strategies import Input, dtype_name, inputs, lengths

from .test_kv_cache import refuses

VALUES = ("normal", "zeros", "ties", "denormal", "negative")
SIZES = (1, 3, 7, 16, 17, 64, 255, 256)
sizes = st.sampled_from((1, 2, 7, 8, 15, 16, 17, 32)) | st.integers(1, 40)
scales = st.none() | st.floats(0.01, 1)
windows = st.none() | st.integers(1, 40)
UNREAD = (-1, 10**6, -(10**9))  # what table entries that hold no key may be


def scattered(
    B: int, size: int, counts: list[int], seed: int, width: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Tables [B, M] of shuffled blocks with spare ones between, lengths [B], which slots hold a key [N, S].

    Every second row begins with the first blocks of the row before, as after a shared prompt.
    """
    g = torch.Generator().manual_seed(seed)
    held = [-(-max(0, n) // size) for n in counts]
    M = max([width, *held])
    order = iter(torch.randperm(sum(held) + 3, generator=g).tolist())
    tables = torch.tensor(UNREAD)[torch.randint(0, 3, (B, M), generator=g)].int()
    used = torch.zeros(sum(held) + 3, size, dtype=torch.bool)
    for b, n in enumerate(counts):
        for i in range(held[b]):
            full = min(n, counts[b - 1]) // size if b % 2 else 0
            tables[b, i] = tables[b - 1, i] if i < full else next(order)
            used[tables[b, i], : n - i * size] = True
    return tables, torch.tensor(counts, dtype=torch.int32), used


def pool(x: Input, used: Tensor, filler: float = math.nan, layout: str = "blocks") -> Tensor:
    """A pool [N, S, Hkv, D] of a recipe's values; where no key is, the filler.

    layout: "blocks", one of several "layers", or "heads" (stored [N, Hkv, S, D]).
    """
    values = torch.where(used[:, :, None, None], x.on("cpu"), filler).to(getattr(torch, x.dtype))
    if layout == "heads":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "layers":
        return torch.stack((torch.full_like(values, filler), values, values))[1]
    return values


@st.composite
def cases(draw: Any, dtype: torch.dtype, longest: int = 14, filler: float = math.nan) -> tuple[Any, ...]:
    """q, k, v, tables, lengths of any sizes and places; slack of NaN."""
    B, Hkv, group, D = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(dims)
    size, Tq = draw(sizes, label="block size"), draw(st.sampled_from((1, 1, 2, 5)))
    counts = [draw(st.integers(-1, 2) | lengths(longest)) for _ in range(B)]
    tables, counts_, used = scattered(B, size, counts, draw(st.integers(0, 99)), draw(st.integers(0, 3)))
    layout = draw(st.sampled_from(("blocks", "layers", "heads")))
    q = draw(inputs((B, Hkv * group, Tq, D), dtype, VALUES))
    shape = (*used.shape, Hkv, D)
    k, v = (
        pool(
            Input(shape, dtype_name(dtype), draw(st.integers(0, 99)), draw(st.sampled_from(VALUES))),
            used,
            filler,
            layout,
        )
        for _ in "kv"
    )
    integer = draw(st.sampled_from((torch.int32, torch.int64)))
    return q, k, v, tables.to(integer), counts_.to(integer)


dims = st.sampled_from((1, 3, 8, 16, 33))


@implementations(paged_attention, dtypes=True)
@given(data=st.data(), scale=scales, window=windows)
def test_every_case_matches_the_oracle(device, impl, dtype, data, scale, window):
    check(impl, *data.draw(cases(dtype), label="case"), scale=scale, window=window, device=device)


@implementations(paged_attention)
def test_any_block_size_matches_the_oracle(device, impl):
    for size in SIZES:
        tables, counts, used = scattered(4, size, [size, size + 1, max(1, size - 1), 2 * size + 1], size)
        k, v = (pool(Input((*used.shape, 1, 8), seed=seed), used) for seed in (1, 2))
        check(impl, Input((4, 2, 1, 8)), k, v, tables, counts, device=device)


@implementations(paged_attention)
@given(D=st.sampled_from((64, 80, 128, 256)), group=st.sampled_from((1, 4)), dtype=st.sampled_from(FLOATS))
def test_head_dims_of_models_match_the_oracle(device, impl, D, group, dtype):
    tables, counts, used = scattered(2, 16, [19, 34], D)
    k, v = (pool(Input((*used.shape, 2, D), dtype_name(dtype), seed), used) for seed in (1, 2))
    check(impl, Input((2, 2 * group, 1, D), dtype_name(dtype)), k, v, tables, counts, device=device)


@implementations(paged_attention)
@given(data=st.data(), filler=st.sampled_from((math.nan, math.inf, -math.inf, 1e30)))
def test_what_is_unused_never_reaches_the_output(device, impl, data, filler):
    case = data.draw(cases(torch.float32, filler=filler), label="case")
    check(impl, *case, device=device)


@implementations(paged_attention)
@given(data=st.data(), chunks=st.lists(st.integers(1, 8), min_size=1, max_size=3), known=st.integers(0, 12))
def test_a_prompt_in_chunks_gives_the_one_shot(device, impl, data, chunks, known):
    """Each chunk after a prefix that is there: the queries of one after the other are those of the whole."""
    new, size = sum(chunks), data.draw(sizes, label="block size")
    tables, counts, used = scattered(1, size, [known + new], new)
    q = Input((1, 4, new, 8)).on(device)
    k, v = (pool(Input((*used.shape, 2, 8), seed=seed), used).to(device) for seed in (1, 2))
    tables, counts = tables.to(device), counts.to(device)
    parts, at = [], 0
    for chunk in chunks:
        at += chunk
        with poisoned():
            parts.append(impl(q[:, :, at - chunk : at], k, v, tables, counts - new + at))
    call = f"{impl} in chunks of {chunks} after {known}, blocks of {size}"
    judge(impl, torch.cat(parts, 2), (q, k, v, tables, counts), {}, call)


@implementations(paged_attention)
@given(data=st.data())
def test_where_blocks_lie_does_not_matter(device, impl, data):
    """The same keys in other blocks give the same bits."""
    size, n = data.draw(sizes, label="block size"), data.draw(st.integers(1, 30), label="keys")
    q, rows = Input((1, 2, 1, 8)).on(device), Input((2, n, 1, 8), seed=3).on(device)
    results = []
    for seed in (1, 2):
        tables, counts, used = scattered(1, size, [n], seed)
        k, v = torch.full((2, *used.shape, 1, 8), math.nan, device=device)
        named = tables[0, torch.arange(n) // size].long()
        for memory, values in ((k, rows[0]), (v, rows[1])):
            memory[named, torch.arange(n) % size] = values
        results.append(impl(q, k, v, tables.to(device), counts.to(device)))
    assert torch.equal(*results)


@implementations(paged_attention, only=lambda impl: "cut" in inspect.signature(impl.fn).parameters)
@given(
    data=st.data(),
    rows=st.sampled_from((16, 32)),
    keys=st.sampled_from((16, 32)),
    splits=st.sampled_from((1, 2, 5)),
    window=windows,
)
def test_any_cut_matches_the_oracle(device, impl, data, rows, keys, splits, window):
    from perf_lab.paged_attention.triton import Launch

    case = data.draw(cases(torch.float32, longest=40), label="case")
    check(impl, *case, window=window, cut=Launch(rows, keys, splits, 4, 2), device=device)


@implementations(paged_attention)
def test_empty_in_empty_out(device, impl):
    tables, counts, used = scattered(2, 4, [3, 9], 0)
    for shape in ((2, 4, 0, 8), (2, 0, 3, 8)):
        k = pool(Input((*used.shape, 0 if shape[1] == 0 else 2, 8)), used)
        check(impl, Input(shape), k, k, tables, counts, device=device)
    k = pool(Input((*used.shape, 2, 8)), used)
    check(impl, Input((0, 4, 1, 8)), k, k, tables[:0], counts[:0], device=device)
    for no_blocks in ((k, tables[:, :0]), (k[:0], tables)):
        check(impl, Input((2, 4, 3, 8)), no_blocks[0], no_blocks[0], no_blocks[1], counts * 0, device=device)


@implementations(paged_attention)
@given(bad=st.deferred(lambda: st.sampled_from(sorted(REFUSED))))
def test_what_the_contract_refuses_is_refused(device, impl, bad):
    tables, counts, used = scattered(2, 4, [3, 9], 0)
    k, v = (pool(Input((*used.shape, 2, 8), seed=seed), used) for seed in (1, 2))
    args = {"q": Input((2, 4, 3, 8)).on("cpu"), "k": k, "v": v, "tables": tables, "lengths": counts}
    naming, change = REFUSED[bad]
    with refuses(TypeError, ValueError, naming=naming):
        impl(**{name: build(x, device) for name, x in {**args, **change(args)}.items()})


def test_cost_is_the_formula():
    tables, counts, used = scattered(2, 4, [3, 9], 0)
    q, k = Input((2, 4, 2, 8)).on(), pool(Input((*used.shape, 2, 8)), used)
    pairs = 4 * ((2 + 3) + (8 + 9))  # heads, and what the last two queries of each row see
    moved = (2 * 2 * 4 * 2 * 8 + 2 * (3 + 9) * 2 * 8) * 4 + (1 + 3) * 4  # q, result, keys, values; entries
    assert paged_attention.cost(q, k, k, tables, counts) == Cost(4 * 8 * pairs, moved)


@implementations(paged_write, dtypes=True)
@given(
    data=st.data(), size=sizes, new=st.integers(0, 5), layout=st.sampled_from(("blocks", "layers", "heads"))
)
def test_a_write_puts_tokens_into_their_slots_and_nowhere_else(device, impl, dtype, data, size, new, layout):
    starts = data.draw(st.lists(st.integers(-6, 20), min_size=1, max_size=3), label="starts")
    tables, _, used = scattered(1, size, [sum(max(0, start + new) + size for start in starts)], size)
    cuts = [-(-max(0, start + new) // size) for start in starts]  # blocks of their own for each row
    rows = [tables[0, sum(cuts[:b]) : sum(cuts[: b + 1])].tolist() for b in range(len(cuts))]
    width = max(1, *cuts, 1)
    own = torch.tensor([row + [UNREAD[0]] * (width - len(row)) for row in rows]).to(device)
    k, v = (
        pool(Input((*used.shape, 3, 5), dtype_name(dtype), s), used, 0.5, layout).to(device) for s in (1, 2)
    )
    new_k, new_v = (data.draw(inputs((len(starts), 3, new, 5), dtype, ("normal",))).on(device) for _ in "kv")
    at = torch.tensor(starts, device=device)
    should_be = paged_write.oracle(k.clone(), v.clone(), new_k, new_v, own, at)
    impl(k, v, new_k, new_v, own, at)
    assert torch.equal(k, should_be[0]) and torch.equal(v, should_be[1])


@implementations(paged_attention)
@given(seed=st.integers(0, 99), size=sizes, n=st.integers(1, 30))
def test_one_block_after_another_is_the_dense_attention(device, impl, seed, size, n):
    """Against the op `attention` on the same numbers without blocks."""
    tables, counts, used = scattered(1, size, [n], seed)
    k, v = (pool(Input((*used.shape, 2, 8), seed=s), used) for s in (1, 2))
    named = tables[0, torch.arange(n) // size].long()
    keys, values = (x[named, torch.arange(n) % size].transpose(0, 1)[None].double() for x in (k, v))
    q = Input((1, 4, min(n, 3), 8), seed=seed).on("cpu")
    should_be = attention.oracle(q.double(), keys, values, causal=True)
    assert torch.allclose(
        paged_attention.oracle(q.double(), k.double(), v.double(), tables, counts), should_be
    )
    check(impl, q, k, v, tables, counts, device=device)


@implementations(paged_turn)
@given(
    seed=st.integers(0, 99),
    size=sizes,
    starts=st.lists(st.integers(-1, 12), min_size=1, max_size=3),
    D=st.sampled_from((4, 6)),
    turned=st.sampled_from(("each row", "all alike", "not")),
)
def test_one_kernel_turns_and_stores_as_a_rotation_and_a_write(device, impl, seed, size, starts, D, turned):
    H, Hkv, B = 4, 2, len(starts)
    blocks = -(-13 // size)
    tables = torch.randperm(B * blocks).view(B, blocks).int().to(device)
    qkv = Input((B, 1, H + 2 * Hkv, D), seed=seed).on(device)
    rows = () if turned == "all alike" else (B,)
    cos, sin = (Input((*rows, 1, 1, D), seed=seed + i).on(device) for i in (1, 2))
    k, v = (Input((B * blocks, size, Hkv, D), seed=seed + i).on(device) for i in (3, 4))
    qk, new_v = qkv.split((H + Hkv, Hkv), 2)
    qk = qk if turned == "not" else rotate(qk, cos, sin)
    at = torch.tensor(starts, device=device)
    new_k = qk[:, :, H:].transpose(1, 2)
    should_be = paged_write.oracle(k.clone(), v.clone(), new_k, new_v.transpose(1, 2), tables, at)
    q = impl.fn(qkv.flatten(2), None if turned == "not" else (cos, sin), H, k, v, tables, at)
    close = {"rtol": 0, "atol": 2 * 16 * eps(torch.float32)}  # two roundings of products below 16
    torch.testing.assert_close(q, qk[:, :, :H].transpose(1, 2), **close)
    torch.testing.assert_close(k, should_be[0], **close)
    assert torch.equal(v, should_be[1])


def _changed(naming: str, **change: Any) -> Any:
    return naming, lambda args: {name: fn(args[name]) if callable(fn) else fn for name, fn in change.items()}


REFUSED: dict[str, Any] = {
    "q of no tensor": _changed("q", q=[1.0]),
    "q without a batch": _changed("q", q=lambda q: q[0]),
    "q of integers": _changed("q", q=lambda q: q.long()),
    "heads that do not divide": _changed("q", q=lambda q: q[:, :3]),
    "k of another dtype": _changed("k", k=lambda k: k.double()),
    "k of another head dim": _changed("k", k=lambda k: k[..., :7]),
    "k of layers": _changed("k", k=lambda k: k[None]),
    "v of fewer blocks": _changed("v", v=lambda v: v[1:]),
    "blocks of 257": _changed("k", k=torch.zeros(1, 257, 2, 8), v=torch.zeros(1, 257, 2, 8)),
    "blocks of none": _changed("k", k=torch.zeros(1, 0, 2, 8), v=torch.zeros(1, 0, 2, 8)),
    "tables of floats": _changed("tables", tables=lambda t: t.float()),
    "tables of another batch": _changed("tables", tables=lambda t: t[:1]),
    "tables of no tensor": _changed("tables", tables=lambda t: t.tolist()),
    "lengths of two axes": _changed("lengths", lengths=lambda n: n[:, None]),
    "lengths of another batch": _changed("lengths", lengths=lambda n: n[:1]),
    "lengths of no ints": _changed("lengths", lengths=lambda n: n.float()),
    "window of none": _changed("window", window=0),
    "window of no int": _changed("window", window=True),
    "negative scale": _changed("scale", scale=-1.0),
}
if not torch.cuda.is_available():  # on an accelerator the values are not looked at
    REFUSED |= {
        "lengths past the tables": _changed("lengths", lengths=lambda n: n + 10),
        "a block that is not there": _changed("tables", tables=lambda t: t.clone().fill_(99)),
        "a negative block": _changed("tables", tables=lambda t: t.clone().fill_(-1)),
    }
