"""Flash attention forward in Triton: tiles of queries against tiles of keys, softmax online.

Scores never leave the chip, so q, k, v and the result are all that moves: at
long lengths the tensor cores are the limit. What keeps them busy here: keys
that every query of a tile sees are scored without a mask, only the tiles at
the edges of sight (diagonal, window, end of the keys) with one; scores are in
units of log2, one multiplication for scale and base; heavy tiles go first; on
Hopper the copy engine loads the tiles.

Sources: Dao, FlashAttention-2, arXiv:2307.08691; Milakov and Gimelshein, arXiv:1805.02867.
"""

# ruff: noqa: ANN001, ANN201 -- a kernel has Triton's types and branches, not Python's
# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perf_lab import machine
from perf_lab.attention import attention
from perf_lab.attention.triton_tiles import (
    LIMITS,
    LOG2_E,
    NO_MASK,
    VECTOR,
    aligned,
    block_for,
    capability,
    describable,
    described,
    over_keys,
    result_for,
    rows_whole,
)
from perf_lab.library import operator
from perf_lab.op import Limit, LimitError


class Tiles(NamedTuple):
    """How the kernel is cut: queries and keys of a tile, warps of a program, stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


# By padded head dim and causal, half precision. Any cut is right; these were the fastest tried on an H200.
HOPPER = {
    (64, False): Tiles(64, 128, 4, 2),
    (64, True): Tiles(64, 128, 4, 2),
    (128, False): Tiles(128, 64, 4, 2),
    (128, True): Tiles(128, 64, 4, 2),
    (256, False): Tiles(128, 64, 8, 2),
    (256, True): Tiles(128, 64, 8, 2),
}
POINTERS = {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 4, 2)}
FLOAT32 = {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 2)}
TOGETHER = 2**25  # bytes of keys and values that a band of heads reads
INTERPRETED, INTERPRETED_LONG = Tiles(32, 16, 4, 1), Tiles(256, 256, 4, 1)  # short lengths have edges too


def tiles_for(q: Tensor, keys: int, block: int, causal: bool, tma: bool) -> Tiles:
    """The cut by dtype, number of keys, padded head dim, and what loads them."""
    if machine.interpreting():
        return INTERPRETED if keys <= 96 else INTERPRETED_LONG
    if q.dtype is torch.float32:
        return FLOAT32[block]
    return HOPPER[block, causal] if tma else POINTERS[block]


SIZES = [
    *("q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row"),
    *("lengths_step", "together", "heads", "group", "queries", "all_keys", "window", "D", "DV"),
]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["lengths_ptr"])
def flash_kernel(
    q,
    k,
    v,
    o,
    lengths_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    lengths_step,
    together,
    heads,
    group,
    queries,
    all_keys,
    window,
    scale,
    D,
    DV,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    FULL: tl.constexpr,
    VEC: tl.constexpr,
    TMA: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of M queries of one head.

    q, k, v, o: pointers with strides in elements (last axes contiguous, o all of it), or, TMA, descriptors.
    together: heads whose heaviest tiles go first, before the next heads begin: few, and their keys stay in
    the L2 cache; many, and no heavy tile is left for the end. scale: of the scores, times log2(e).
    RAGGED: lengths_ptr holds a number of keys a batch row. VEC: of what strides, D and DV are multiples.
    """
    tile_count = (queries + M - 1) // M
    program = tl.program_id(0)
    band = program // (tile_count * together)
    within = program % (tile_count * together)
    rows = tl.minimum(together, tl.num_programs(0) // tile_count - band * together)
    tile = tile_count - 1 - within // rows  # under a causal mask the last tiles see the most
    row = band * together + within % rows  # of B * Hq
    batch = row // heads
    head = row % heads
    kv_head = head // group
    keys = all_keys
    if RAGGED:
        keys = tl.minimum(tl.load(lengths_ptr + batch * lengths_step).to(tl.int32), all_keys)
    i = tile * M + tl.arange(0, M)
    d = tl.arange(0, BLOCK)
    if TMA:
        q_tile = q.load([batch, head, tile * M, 0]).reshape(M, BLOCK)
    else:
        D = D // VEC * VEC
        DV = DV // VEC * VEC
        k_row = k_row // VEC * VEC
        v_row = v_row // VEC * VEC
        q += batch.to(tl.int64) * (q_batch // VEC * VEC) + head.to(tl.int64) * (q_head // VEC * VEC)
        k += batch.to(tl.int64) * (k_batch // VEC * VEC) + kv_head.to(tl.int64) * (k_head // VEC * VEC)
        v += batch.to(tl.int64) * (v_batch // VEC * VEC) + kv_head.to(tl.int64) * (v_head // VEC * VEC)
        q_at = q + i.to(tl.int64)[:, None] * (q_row // VEC * VEC) + d[None, :]
        q_tile = tl.load(q_at, mask=(i < queries)[:, None] & (d < D)[None, :], other=0.0)  # [M, BLOCK]
    if UPCAST:
        q_tile = q_tile.to(tl.float32)

    acc = tl.zeros([M, BLOCK], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], -float("inf"), tl.float32)
    first = tile * M + keys - queries  # the last key that the tile's first query sees
    last_seen = first + tl.arange(0, M)
    stop = keys
    seen_by_all = keys  # keys before this one are seen by every query, but for the window
    if CAUSAL:
        stop = tl.minimum(keys, first + M)
        seen_by_all = tl.minimum(keys, first + 1)
    stop = tl.maximum(stop, 0)
    start = 0
    left = 0  # keys from this one on are in every query's window
    if WINDOW:
        start = tl.maximum(first - window + 1, 0) // N * N
        left = (tl.maximum(first + M - window, 0) + N - 1) // N * N
    right = tl.maximum(seen_by_all, 0) // N * N
    left = tl.minimum(tl.maximum(left, start), (stop + N - 1) // N * N)
    right = tl.maximum(right, left)
    if WINDOW:
        acc, total, top = over_keys(
            acc, total, top, q_tile, k, v, k_row, v_row, batch, kv_head, start, left, keys,
            last_seen, window, 0, 0, scale, D, DV,
            BLOCK, N, True, NO_MASK, CAUSAL, WINDOW, RAGGED, FULL, TMA, UPCAST,
        )  # fmt: skip
    acc, total, top = over_keys(
        acc, total, top, q_tile, k, v, k_row, v_row, batch, kv_head, left, right, keys,
        last_seen, window, 0, 0, scale, D, DV,
        BLOCK, N, False, NO_MASK, CAUSAL, WINDOW, RAGGED, FULL, TMA, UPCAST,
    )  # fmt: skip
    acc, total, top = over_keys(
        acc, total, top, q_tile, k, v, k_row, v_row, batch, kv_head, right, stop, keys,
        last_seen, window, 0, 0, scale, D, DV,
        BLOCK, N, True, NO_MASK, CAUSAL, WINDOW, RAGGED, FULL, TMA, UPCAST,
    )  # fmt: skip

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # who saw no key gets zeros
    if TMA:
        o.store([batch, head, tile * M, 0], acc.to(o.dtype).reshape(1, 1, M, BLOCK))
    else:
        o_at = o + (row.to(tl.int64) * queries + i)[:, None] * DV + d[None, :]
        tl.store(o_at, acc.to(o.dtype.element_ty), mask=(i < queries)[:, None] & (d < DV)[None, :])


# one kernel for all pointers that a view may have, where no load is wide anyway
unaligned_kernel = triton.jit(
    flash_kernel.fn,
    do_not_specialize=SIZES,
    do_not_specialize_on_alignment=["q", "k", "v", "lengths_ptr"],
)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    lengths: Tensor | None = None,
    cut: Tiles | None = None,
    together: int | None = None,
    tma: bool | None = None,
    **options: Any,
) -> Tensor:
    """The launch. cut, together, tma: how, chosen by shape and device by default. options: Triton's own."""
    (B, Hq, Tq, D), (Hkv, Tk), Dv = q.shape, k.shape[1:3], v.shape[3]
    if 0 in (B, Hq, Tq, Tk, Dv):
        return q.new_zeros(B, Hq, Tq, Dv)
    out = result_for(q, v)
    q, k, v = (rows_whole(x) for x in (q, k, v))
    lengths = None if lengths is None else lengths.to(q.device)
    block = block_for(q, v)
    if tma is None:
        tma = capability(q.device) >= 9 and describable(q, k, v) and aligned(out)
    band = TOGETHER * (Hq // Hkv) // (Tk * (D + Dv) * k.element_size())
    together = together or (max(1, min(band, 2**16)) if causal else 1)
    cut = cut or tiles_for(q, Tk, block, causal, tma)
    places: tuple[Any, ...] = (q, k, v, out)
    if tma:
        rows = (cut.queries, cut.keys, cut.keys, cut.queries)
        places = tuple(described(x, n, block) for x, n in zip(places, rows, strict=True))
    vec = VECTOR // q.element_size() if aligned(q, k, v, out) else 1
    kernel = flash_kernel if vec > 1 else unaligned_kernel
    with torch.cuda.device_of(q):
        kernel[(math.ceil(Tq / cut.queries) * B * Hq,)](
            *places,
            q if lengths is None else lengths,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            0 if lengths is None else lengths.stride(0), together, Hq, Hq // Hkv, Tq, Tk, window or 0,
            (scale or D**-0.5) * LOG2_E.value, D, Dv,
            block, cut.queries, cut.keys, causal, window is not None, lengths is not None,
            tma or (vec > 1 and block == D == Dv), vec, tma, machine.interpreting(),
            num_warps=cut.warps, num_stages=cut.stages, **options,
        )  # fmt: skip
    return out.to(q.dtype)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@operator("attention_flash", _fake)
def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """`run` with what torch's compiler may see of it."""
    return run(q, k, v, causal=causal, scale=scale, window=window, lengths=lengths)


NO_MASK_TENSOR = Limit("no mask tensor", lambda *_, mask=None, **__: mask is not None)


@attention.register("flash", devices=("cuda",), interpreted=True, limits=(*LIMITS, NO_MASK_TENSOR))
def triton_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Attention [B, Hq, Tq, Dv] of q [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv]; the
    contract is the op's. float32 is multiplied in float32 (no tf32), on the plain cores.
    """
    if mask is not None:  # also where nobody checked the limits
        raise LimitError(f"mask: got one, {NO_MASK_TENSOR.reason}")
    return flash(q, k, v, causal, scale, window, lengths)
