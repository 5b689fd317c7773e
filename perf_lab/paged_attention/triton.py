"""Paged attention in Triton: one pass over the keys, each found through the row's block table.

A program has a tile of queries of one row and KV head, the group's heads packed below each other, and one of
SPLITS equal parts of the keys that these see; parts are joined by a second kernel. Grids come from shapes
alone, lengths and tables are read on the device: nothing waits, and a graph of it replays for any lengths.

Source: Dao et al., Flash-Decoding for long-context inference (2023); Kwon et al., arXiv:2309.06180.
"""

# ruff: noqa: ANN001, ANN201 -- parameters of a kernel have Triton's types, not Python's
# mypy: disable-error-code="no-untyped-def"

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perf_lab import machine
from perf_lab.op import Limit
from perf_lab.paged_attention import paged_attention, paged_turn, paged_write

SMALLEST_SPLIT = 128  # keys; below, joining costs more than it gives


class Launch(NamedTuple):
    """How the work is cut: queries (times the group's heads) of a tile, keys of a step, parts of the keys,
    warps and pipeline stages of a program.
    """

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


def launch(rows: int, dim: int, slots: int, programs: int, itemsize: int, processors: int) -> Launch:
    """The cut for `rows` packed queries of `dim` elements over up to `slots` keys, `programs` rows and heads.

    Keys are split as long as all programs are on the processors at once: four on each while decoding, two of
    the larger ones of a prompt. float32 is multiplied without matrix units, in code that grows with the
    tile: small ones.
    """
    if itemsize == 2:
        tile, keys, together = min(64, max(16, triton.next_power_of_2(rows))), 64, 4 if rows <= 16 else 2
    else:
        tile, keys, together = 16 if dim > 128 else min(32, max(16, rows)), 16 if dim > 128 else 32, 4
    fitting = together * processors // max(1, programs * -(-rows // tile))
    splits = max(1, min(fitting, slots // SMALLEST_SPLIT, 64))
    return Launch(triton.next_power_of_2(tile), keys, splits, 4, 3 if itemsize == 2 else 2)


# numbers that are no reason to compile again
STILL = [
    *("heads", "group", "queries", "window", "size", "length_b", "table_b"),
    *("q_b", "q_h", "q_t", "k_n", "k_s", "k_h", "v_n", "v_s", "v_h", "o_b", "o_h", "o_t"),
]
UNIT = 16  # elements: strides that are multiples of it are told in it: 16 bytes are seen to fit


@triton.jit
def step(
    q, top, total, out, k_ptr, v_ptr, table_ptr, at, stop, position, window, scale, d, dim,
    k_n, k_s, v_n, v_s, S, KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """KEYS keys from `at` on. MASKED: some of them are at or past `stop`, or hidden from some query."""
    key = at + tl.arange(0, KEYS)
    here = (d < dim)[None, :]
    if MASKED:
        exists = key < stop
        block = tl.load(table_ptr + key // S, mask=exists, other=0).to(tl.int64)
        here = here & exists[:, None]
    else:
        block = tl.load(table_ptr + key // S).to(tl.int64)
    place = key - key // S * S
    k_at = k_ptr + (block * k_n + place * k_s)[:, None] + d[None, :]
    v_at = v_ptr + (block * v_n + place * v_s)[:, None] + d[None, :]
    if EVEN and not MASKED:
        k, v = tl.load(k_at), tl.load(v_at)  # [KEYS, DIM]
    else:
        k, v = tl.load(k_at, mask=here, other=0.0), tl.load(v_at, mask=here, other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        seen = exists[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.where(seen, score, -float("inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    shift = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is NaN
    weight = tl.exp2(score - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weight, 1)
    out = out * decay[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return higher, total, out


@triton.jit(do_not_specialize=STILL)
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, part_ptr, top_ptr,
    q_b, q_h, q_t, k_n, k_s, k_h, v_n, v_s, v_h, table_b, length_b, o_b, o_h, o_t,
    heads, group, queries, dim, scale, window, size,
    SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS packed queries of one row and KV head, over one part of the keys.

    q [B, Hq, Tq, D], k and v [N, S, Hkv, D], all with elements of the last axis beside each other.
    SPLITS = 1 writes out [B, Hq, Tq, D]; else part [programs, SPLITS, ROWS, DIM], the output so far, and
    top [programs, SPLITS, 2, ROWS], the highest score (base 2) and the sum of weights.
    SIZE is the block size if that is a power of 2 (a shift then finds the block), else 0. EVEN: D is DIM.
    Strides of q, k, v and out are in UNIT elements.
    """
    q_b, q_h, q_t = q_b * UNIT, q_h * UNIT, q_t * UNIT
    k_n, k_s, k_h, v_n, v_s, v_h = k_n * UNIT, k_s * UNIT, k_h * UNIT, v_n * UNIT, v_s * UNIT, v_h * UNIT
    o_b, o_h, o_t = o_b * UNIT, o_h * UNIT, o_t * UNIT
    S = size if SIZE == 0 else SIZE
    program, split = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(queries * group, ROWS)
    tile, head, b = program % tiles, program // tiles % heads, program // tiles // heads
    n = tl.load(length_ptr + b * length_b).to(tl.int32)
    table_ptr += b.to(tl.int64) * table_b
    k_ptr += head.to(tl.int64) * k_h
    v_ptr += head.to(tl.int64) * v_h

    row = tile * ROWS + tl.arange(0, ROWS)
    query, member = row // group, row % group
    position = query + n - queries  # of the query among the keys: the last that it sees
    d = tl.arange(0, DIM)
    q_at = b.to(tl.int64) * q_b + (head * group + member).to(tl.int64) * q_h + query.to(tl.int64) * q_t
    inside = (row < queries * group)[:, None] & (d < dim)[None, :]
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=inside, other=0.0)

    # keys that some query of the tile sees are first .. end - 1, and this part start .. stop - 1
    lowest = tile * ROWS // group + n - queries
    end = tl.minimum(((tile + 1) * ROWS - 1) // group, queries - 1) + n - queries + 1
    first = 0
    if WINDOW:
        first = tl.maximum(0, lowest - window + 1)
    part = tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), SPLITS), KEYS) * KEYS
    start = first + split * part
    stop = tl.minimum(start + part, end)
    plain = start  # up to here whole steps of keys that every query of the tile sees
    if not WINDOW:
        plain += tl.maximum(tl.minimum(stop, lowest + 1) - start, 0) // KEYS * KEYS

    scale *= 1.4426950408889634  # log2(e): powers are of 2
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for at in range(start, plain, KEYS):
        top, total, out = step(
            q, top, total, out, k_ptr, v_ptr, table_ptr, at, stop, position, window, scale, d, dim,
            k_n, k_s, v_n, v_s, S, KEYS, False, WINDOW, EVEN,
        )  # fmt: skip
    for at in tl.range(plain, stop, KEYS, num_stages=1):
        top, total, out = step(
            q, top, total, out, k_ptr, v_ptr, table_ptr, at, stop, position, window, scale, d, dim,
            k_n, k_s, v_n, v_s, S, KEYS, True, WINDOW, EVEN,
        )  # fmt: skip

    if SPLITS == 1:
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
        o_at = b.to(tl.int64) * o_b + (head * group + member).to(tl.int64) * o_h + query.to(tl.int64) * o_t
        tl.store(out_ptr + o_at[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        slot = program.to(tl.int64) * SPLITS + split
        lane = tl.arange(0, ROWS)
        tl.store(part_ptr + (slot * ROWS + lane)[:, None] * DIM + d[None, :], out)
        tl.store(top_ptr + slot * 2 * ROWS + lane, top)
        tl.store(top_ptr + slot * 2 * ROWS + ROWS + lane, total)


@triton.jit(do_not_specialize=["heads", "group", "queries"])
def join(
    part_ptr, top_ptr, out_ptr, o_b, o_h, o_t, heads, group, queries, dim,
    ROWS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One query and head: its SPLITS parts in one, rescaled to the highest score. PARTS: a power of 2."""
    tiles = tl.cdiv(queries * group, ROWS)
    lane = tl.program_id(1)
    program = tl.program_id(0)
    tile, head, b = program % tiles, program // tiles % heads, program // tiles // heads
    row = tile * ROWS + lane
    split, d = tl.arange(0, PARTS), tl.arange(0, DIM)
    given = split < SPLITS
    slot = program.to(tl.int64) * SPLITS + split
    top = tl.load(top_ptr + slot * 2 * ROWS + lane, mask=given, other=-float("inf"))
    total = tl.load(top_ptr + slot * 2 * ROWS + ROWS + lane, mask=given, other=0.0)
    highest = tl.max(top, 0)
    scale = tl.exp2(top - tl.where(highest == -float("inf"), 0.0, highest))  # 0 for a part without keys
    part = tl.load(
        part_ptr + (slot * ROWS + lane)[:, None] * DIM + d[None, :], mask=given[:, None], other=0.0
    )
    total = tl.sum(total * scale, 0)
    out = tl.sum(part * scale[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    o_at = (
        b.to(tl.int64) * o_b
        + (head * group + row % group).to(tl.int64) * o_h
        + (row // group).to(tl.int64) * o_t
    )
    tl.store(
        out_ptr + o_at + d, out.to(out_ptr.dtype.element_ty), mask=(d < dim) & (row + 0 * d < queries * group)
    )


@triton.jit(do_not_specialize=["new", "heads", "size", "start_b"])
def put(
    k_ptr, v_ptr, new_k_ptr, new_v_ptr, table_ptr, start_ptr,
    k_n, k_s, k_h, v_n, v_s, v_h, nk_b, nk_h, nk_t, nv_b, nv_h, nv_t, table_b, start_b, new, heads, dim, size,
    HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One new token of one row, all its heads; k and v one after the other."""
    b, t = (tl.program_id(0) // new).to(tl.int64), tl.program_id(0) % new
    position = tl.load(start_ptr + b * start_b).to(tl.int32) + t
    h, d = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    inside = (h < heads) & (d < dim) & (position + 0 * h >= 0)
    at = tl.maximum(position, 0)
    block = tl.load(table_ptr + b * table_b + at // size).to(tl.int64)
    place = at % size
    new_k = tl.load(new_k_ptr + b * nk_b + h * nk_h + t.to(tl.int64) * nk_t + d, mask=inside, other=0.0)
    tl.store(k_ptr + block * k_n + place * k_s + h * k_h + d, new_k, mask=inside)
    new_v = tl.load(new_v_ptr + b * nv_b + h * nv_h + t.to(tl.int64) * nv_t + d, mask=inside, other=0.0)
    tl.store(v_ptr + block * v_n + place * v_s + h * v_h + d, new_v, mask=inside)


@triton.jit(do_not_specialize=["heads", "kv_heads", "size", "start_b"])
def turn(
    qkv_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, table_ptr, start_ptr,
    qkv_b, turn_b, k_n, k_s, k_h, v_n, v_s, v_h, table_b, start_b, heads, kv_heads, size,
    D: tl.constexpr, DIM: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """One head of one row of qkv [B, (H + 2 Hkv) D]: a query to q [B, H, D], a key or value to its slot."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(start_ptr + b * start_b).to(tl.int32)
    at = tl.maximum(position, 0)
    block = tl.load(table_ptr + b * table_b + at // size).to(tl.int64)
    place = at % size
    d = tl.arange(0, DIM)
    inside = d < D
    written = inside & (position + 0 * d >= 0)
    source = qkv_ptr + b * qkv_b + head * D
    x = tl.load(source + d, mask=inside, other=0.0)
    if head < heads + kv_heads:
        if TURN:
            other = tl.load(source + (d + D // 2) % D, mask=inside, other=0.0).to(tl.float32)
            cos = tl.load(cos_ptr + b * turn_b + d, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + b * turn_b + d, mask=inside, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * cos + other * sin).to(q_ptr.dtype.element_ty)
        if head < heads:
            tl.store(q_ptr + (b * heads + head) * D + d, x, mask=inside)
        else:
            tl.store(k_ptr + block * k_n + place * k_s + (head - heads) * k_h + d, x, mask=written)
    else:
        tl.store(v_ptr + block * v_n + place * v_s + (head - heads - kv_heads) * v_h + d, x, mask=written)


NO_FLOAT64 = Limit("sums are float32, too coarse for float64", lambda q, *_, **how: q.dtype is torch.float64)
WIDE = Limit("head dims above 256 do not fit on a processor", lambda q, *_, **how: q.shape[3] > 256)


@paged_attention.register("triton", devices=("cuda",), interpreted=True, limits=(NO_FLOAT64, WIDE))
def triton_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    cut: Launch | None = None,
) -> Tensor:
    """Attention of q [B, Hq, Tq, D] over k, v [N, S, Hkv, D] -> [B, Hq, Tq, D]. Any `cut` is right."""
    (B, Hq, Tq, D), (N, S, Hkv) = q.shape, k.shape[:3]
    M = tables.shape[1]
    if not (q.numel() and M and N):
        return q.new_zeros(q.shape)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    dtype, plain = q.dtype, machine.interpreting()
    if plain:  # the interpreter reads and rounds bfloat16 wrongly where it is denormal
        q, k, v = q.float(), k.float(), v.float()
    # heads of a token beside each other, as the next layer reads them
    out = torch.empty((B, Tq, Hq, D), dtype=q.dtype, device=q.device).transpose(1, 2)
    group, dim = Hq // Hkv, triton.next_power_of_2(max(16, D))
    if cut is None:
        cut = launch(group * Tq, D, M * S, B * Hkv, q.element_size(), processors(q.device))
    programs = B * Hkv * -(-group * Tq // cut.rows)
    strides = [stride for x in (q, k, v, out) for stride in x.stride()[:3]]
    unit = 1 if any(stride % UNIT for stride in strides) else UNIT
    strides = [stride // unit for stride in strides]
    like: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    parts = torch.empty((programs, cut.splits, cut.rows, dim) if cut.splits > 1 else (1,), **like)
    tops = torch.empty((programs, cut.splits, 2, cut.rows) if cut.splits > 1 else (1,), **like)
    with torch.cuda.device_of(q):
        attend[(programs, cut.splits)](
            q, k, v, tables, lengths, out, parts, tops,
            *strides[:9], tables.stride(0), lengths.stride(0), *strides[9:],
            Hkv, group, Tq, D, D**-0.5 if scale is None else scale, window or 0, S,
            S if S >= 16 and not S & (S - 1) else 0, cut.rows, cut.keys, dim, cut.splits,
            window is not None, dim == D, unit,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        if cut.splits > 1:
            join[(programs, min(cut.rows, group * Tq))](
                parts, tops, out, *out.stride()[:3], Hkv, group, Tq, D,
                cut.rows, dim, cut.splits, triton.next_power_of_2(cut.splits), num_warps=4,
            )  # fmt: skip
    return out.to(dtype)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter has one, and no need of more splits."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@paged_write.register("triton", devices=("cuda",), interpreted=True)
def triton_put(k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, tables: Tensor, starts: Tensor) -> None:
    """Put new_k, new_v [B, Hkv, T, D] into k, v [N, S, Hkv, D], both in one kernel."""
    B, Hkv, T, D = new_k.shape
    if not (new_k.numel() and tables.numel()):
        return
    assert k.stride(3) == v.stride(3) == 1, "keys and values of a token lie beside each other"
    new_k, new_v = (x if x.stride(3) == 1 else x.contiguous() for x in (new_k, new_v))
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    with torch.cuda.device_of(k):
        put[(B * T,)](
            k, v, new_k, new_v, tables, starts,
            *k.stride()[:3], *v.stride()[:3], *new_k.stride()[:3], *new_v.stride()[:3],
            tables.stride(0), starts.stride(0), T, Hkv, D, k.shape[1],
            triton.next_power_of_2(Hkv), triton.next_power_of_2(max(16, D)), num_warps=4,
        )  # fmt: skip


@paged_turn.register("triton", devices=("cuda",), interpreted=True)
def turn_and_put(
    qkv: Tensor,
    turned: tuple[Tensor, Tensor] | None,
    heads: int,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    starts: Tensor,
) -> Tensor:
    """Turn the queries and keys of one token a row, qkv [B, 1, (H + 2 Hkv) D], by (cos, sin) [..., D], the
    sine with the sign of its half; put keys and values into k, v [N, S, Hkv, D] at starts [B] through tables
    [B, M]; give q [B, H, 1, D]. Products are in float32 and rounded once; a start below 0: nothing is put.
    """
    B, (S, kv_heads, D) = qkv.shape[0], k.shape[1:]
    qkv = qkv.reshape(B, -1)
    q = torch.empty(B, heads, 1, D, dtype=qkv.dtype, device=qkv.device)
    cos, sin = (qkv, qkv) if turned is None else (table.reshape(-1, D).contiguous() for table in turned)
    with torch.cuda.device_of(k):
        turn[(B, heads + 2 * kv_heads)](
            qkv, cos, sin, q, k, v, tables, starts,
            qkv.stride(0), D if turned is not None and len(cos) > 1 else 0, *k.stride()[:3], *v.stride()[:3],
            tables.stride(0), starts.stride(0), heads, kv_heads, S,
            D, triton.next_power_of_2(D), turned is not None, num_warps=1,
        )  # fmt: skip
    return q
