"""Attention of few queries against many keys (decoding): the keys are split among programs.

One query against a long cache is a matrix-vector product: reading k and v once
is all there is to do, and one program a head leaves most of the chip idle. So
each program takes a stretch of the keys, keeps its own maximum and sum, and a
second kernel merges the stretches; any number of them gives the same within
rounding. The query heads of a group share a tile, so k and v are read once a
group, not once a head.

The number of stretches comes from shapes alone, how long they are from the
row's own number of keys, which the kernel reads on the device. So a call is
captured into a CUDA graph once and replayed while lengths grow, and costs what
the lengths say, not what the buffer could hold. For that, call the
implementation's `fn` with `lengths` on the device: nothing waits for it there.

Source: Dao et al., Flash-Decoding for long-context inference, PyTorch blog, 2023.
"""

# ruff: noqa: ANN001, ANN201 -- a kernel has Triton's types and branches, not Python's
# mypy: allow-untyped-defs, allow-incomplete-defs

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perf_lab import machine
from perf_lab.attention import attention
from perf_lab.attention.triton_tiles import (
    ADDED_MASK,
    BOOL_MASK,
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
from perf_lab.op import Limit

# Queries times heads of a group, in one tile; the parts of more float32 do not fit into shared memory.
MOST_ROWS = {torch.float16: 128, torch.bfloat16: 128, torch.float32: 32}
LEAST_KEYS = 128  # of a stretch, so that merging stays small beside reading
MOST_SPLITS = 128


class Cut(NamedTuple):
    """Keys of a tile, warps of a program, stages of its pipeline; programs to aim for on each processor."""

    keys: int
    warps: int
    stages: int
    programs: int


# By bytes of a padded row of k. Any cut is right; Hopper's were the fastest tried on an H200, up to 32 rows;
# the others fit into less shared memory.
HOPPER = {128: Cut(128, 4, 3, 1), 256: Cut(128, 4, 3, 1), 512: Cut(64, 4, 3, 1)}
OTHERS = {128: Cut(64, 4, 3, 2), 256: Cut(64, 4, 2, 2), 512: Cut(32, 4, 2, 2)}
FLOAT32 = {256: Cut(32, 4, 2, 2), 512: Cut(32, 4, 2, 2), 1024: Cut(16, 4, 2, 2)}
INTERPRETED, INTERPRETED_LONG = Cut(16, 4, 1, 1), Cut(128, 4, 1, 1)  # short lengths are split too


def cut_for(dtype: torch.dtype, keys: int, block: int, tile: int, major: int) -> Cut:
    """The cut by dtype, number of keys, padded head dim, rows of a tile and major compute capability."""
    if machine.interpreting():
        return INTERPRETED if keys <= 96 else INTERPRETED_LONG
    if dtype is torch.float32:
        return FLOAT32[4 * block]
    return (HOPPER if major >= 9 and tile <= 32 else OTHERS)[2 * block]


@functools.cache
def processors(device: torch.device) -> int:
    """Of a GPU; some number for the interpreter."""
    return 16 if machine.interpreting() else torch.cuda.get_device_properties(device).multi_processor_count


def tile_rows(rows: int) -> int:
    """Rows of a tile that holds so many query rows."""
    return next(size for size in (16, 32, 128) if rows <= size)  # each is one more kernel to compile


def splits_for(places: int, keys: int, programs: int, least: int = LEAST_KEYS) -> int:
    """How many stretches for `places` KV heads of all rows: about `programs` programs in all, but no
    stretch under `least` keys.
    """
    return max(1, min(programs // places, keys // least, MOST_SPLITS))


@triton.jit
def sight(
    all_keys,
    length_at,
    queries,
    window,
    splits,
    N,
    LEAST,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Of a row of the batch: its number of keys, the first one that is read, and the keys of a stretch."""
    keys = all_keys
    if RAGGED:
        keys = tl.minimum(tl.load(length_at).to(tl.int32), all_keys)
    low = 0
    if WINDOW:
        low = tl.maximum(keys - queries - window + 1, 0) // N * N
    stretch = (tl.maximum((keys - low + splits - 1) // splits, LEAST) + N - 1) // N * N
    return keys, low, stretch


SIZES = [
    *("q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row"),
    *("mask_batch", "mask_head", "mask_row", "mask_step", "lengths_step"),
    *("kv_heads", "group", "queries", "all_keys", "window", "splits", "D", "DV"),
]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["lengths_ptr", "mask_ptr"])
def split_kernel(
    q_ptr,
    k,
    v,
    acc_ptr,
    sums_ptr,
    o_ptr,
    lengths_ptr,
    mask_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    mask_batch,
    mask_head,
    mask_row,
    mask_step,
    lengths_step,
    kv_heads,
    group,
    queries,
    all_keys,
    window,
    scale,
    splits,
    D,
    DV,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    FULL: tl.constexpr,
    VEC: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One stretch of keys for the rows = group * queries <= R query rows of one KV head.

    acc [B, Hkv, splits, rows, DV] holds sums of weights times v, sums [B, Hkv, splits, 2, rows] the highest
    score (log2; -inf where no key was seen) and the sum of weights. Row r is head r // queries of the
    group, query r % queries. WHOLE: there is one stretch, and o [B, Hkv, rows, DV] is written at once.
    """
    program = tl.program_id(0)
    split = program % splits
    place = program // splits  # of B * Hkv
    batch = place // kv_heads
    head = place % kv_heads
    rows = group * queries
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    keys, low, stretch = sight(
        all_keys, lengths_ptr + batch * lengths_step, queries, window, splits, N, LEAST, WINDOW, RAGGED
    )
    start = low + split * stretch
    if WHOLE or start < keys:
        r = tl.arange(0, R)
        i = r % queries
        used = r < rows
        d = tl.arange(0, BLOCK)
        D = D // VEC * VEC
        DV = DV // VEC * VEC
        q_at = q_ptr + batch.to(tl.int64) * (q_batch // VEC * VEC) + i.to(tl.int64) * (q_row // VEC * VEC)
        q_at += (head * group + r // queries).to(tl.int64) * (q_head // VEC * VEC)
        mask_at = 0
        if MASK != NO_MASK:
            mask_at = mask_ptr + batch.to(tl.int64) * mask_batch + i.to(tl.int64) * mask_row
            mask_at += tl.where(used, head * group + r // queries, 0).to(tl.int64) * mask_head
        q_tile = tl.load(
            q_at[:, None] + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0
        )  # [R, BLOCK]
        if not TMA:
            k_row = k_row // VEC * VEC
            v_row = v_row // VEC * VEC
            k += batch.to(tl.int64) * (k_batch // VEC * VEC) + head.to(tl.int64) * (k_head // VEC * VEC)
            v += batch.to(tl.int64) * (v_batch // VEC * VEC) + head.to(tl.int64) * (v_head // VEC * VEC)
        stop = tl.minimum(start + stretch, keys)
        first = keys - queries  # the last key that the first query sees
        last_seen = first + i
        right = stop
        if CAUSAL:
            right = tl.minimum(stop, tl.maximum(first + 1, 0))
        if WINDOW or MASK != NO_MASK:
            right = start
        right = tl.maximum(start, right // N * N)
        if UPCAST:
            q_tile = q_tile.to(tl.float32)
        acc = tl.zeros([R, BLOCK], tl.float32)
        total = tl.zeros([R], tl.float32)
        top = tl.full([R], -float("inf"), tl.float32)
        if not WINDOW and MASK == NO_MASK:
            acc, total, top = over_keys(
                acc, total, top, q_tile, k, v, k_row, v_row, batch, head, start, right, keys,
                last_seen, window, mask_at, mask_step, scale, D, DV,
                BLOCK, N, False, MASK, CAUSAL, WINDOW, RAGGED, FULL, TMA, UPCAST,
            )  # fmt: skip
        acc, total, top = over_keys(
            acc, total, top, q_tile, k, v, k_row, v_row, batch, head, right, stop, keys,
            last_seen, window, mask_at, mask_step, scale, D, DV,
            BLOCK, N, True, MASK, CAUSAL, WINDOW, RAGGED, FULL, TMA, UPCAST,
        )  # fmt: skip
        if WHOLE:
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # who saw no key gets zeros
            at = (place.to(tl.int64) * rows + r)[:, None] * DV + d[None, :]
            tl.store(o_ptr + at, acc.to(o_ptr.dtype.element_ty), mask=used[:, None] & (d < DV)[None, :])
        else:
            part = place.to(tl.int64) * splits + split
            at = (part * rows + r)[:, None] * DV + d[None, :]
            tl.store(acc_ptr + at, acc, mask=used[:, None] & (d < DV)[None, :])
            tl.store(sums_ptr + part * 2 * rows + r, top, mask=used)
            tl.store(sums_ptr + (part * 2 + 1) * rows + r, total, mask=used)


# one kernel for all pointers that a view may have, where no load is wide anyway
unaligned_kernel = triton.jit(
    split_kernel.fn,
    do_not_specialize=SIZES,
    do_not_specialize_on_alignment=["q_ptr", "k", "v", "lengths_ptr", "mask_ptr"],
)


@triton.jit(
    do_not_specialize=["lengths_step", "all_keys", "kv_heads", "rows", "queries", "window", "splits", "DV"],
    do_not_specialize_on_alignment=["lengths_ptr"],
)
def merge_kernel(
    acc_ptr,
    sums_ptr,
    o_ptr,
    lengths_ptr,
    lengths_step,
    all_keys,
    kv_heads,
    rows,
    queries,
    window,
    splits,
    DV,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    N: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the stretches of one row: o [B, Hkv, rows, DV]. Stretches without keys were not written."""
    program = tl.program_id(0)
    place = program // rows  # of B * Hkv
    r = program % rows
    lengths_at = lengths_ptr + place // kv_heads * lengths_step
    keys, low, stretch = sight(all_keys, lengths_at, queries, window, splits, N, LEAST, WINDOW, RAGGED)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK)
    part = place.to(tl.int64) * splits + s
    inside = (s < splits) & (low + s * stretch < keys)
    top = tl.load(sums_ptr + part * 2 * rows + r, mask=inside, other=-float("inf"))
    total = tl.load(sums_ptr + (part * 2 + 1) * rows + r, mask=inside, other=0.0)
    acc = tl.load(
        acc_ptr + (part * rows + r)[:, None] * DV + d[None, :],
        mask=inside[:, None] & (d < DV)[None, :],
        other=0.0,
    )  # [BLOCK_S, BLOCK]
    highest = tl.max(top, 0)
    faded = tl.exp2(top - tl.where(highest == -float("inf"), 0.0, highest))
    whole = tl.sum(total * faded, 0)
    out = tl.sum(acc * faded[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(o_ptr + program.to(tl.int64) * DV + d, out.to(o_ptr.dtype.element_ty), mask=d < DV)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    splits: int | None = None,
    cut: Cut | None = None,
    tma: bool | None = None,
    pdl: bool | None = None,
    **options: Any,
) -> Tensor:
    """The launches. splits: the number of stretches; cut, tma, pdl: how; all chosen by shape and device by
    default. options: Triton's own.
    """
    (B, Hq, Tq, D), (Hkv, Tk), Dv = q.shape, k.shape[1:3], v.shape[3]
    if 0 in (B, Hq, Tq, Tk, Dv):
        return q.new_zeros(B, Hq, Tq, Dv)
    out = result_for(q, v)
    q, k, v = (rows_whole(x) for x in (q, k, v))
    lengths = None if lengths is None else lengths.to(q.device)
    group, block = Hq // Hkv, block_for(q, v)
    rows = group * Tq
    tile, major = tile_rows(rows), capability(q.device)
    cut = cut or cut_for(q.dtype, Tk, block, tile, major)
    least = LEAST_KEYS // 4 if machine.interpreting() else LEAST_KEYS  # there, lengths are short
    splits = splits or splits_for(B * Hkv, Tk, processors(q.device) * cut.programs, least)
    splits = min(splits, MOST_SPLITS)  # one program merges them
    tma = (major >= 9 and describable(k, v)) if tma is None else tma
    pdl = (major >= 9 and splits > 1 and not machine.interpreting()) if pdl is None else pdl
    overlap = {"launch_pdl": True} if pdl else {}
    acc = q.new_empty(B, Hkv, splits if splits > 1 else 0, rows, Dv, dtype=torch.float32)
    sums = q.new_empty(B, Hkv, splits if splits > 1 else 0, 2, rows, dtype=torch.float32)
    places = (described(k, cut.keys, block), described(v, cut.keys, block)) if tma else (k, v)
    vec = VECTOR // q.element_size() if aligned(q, k, v, out) else 1
    ragged, step = lengths is not None, 0 if lengths is None else lengths.stride(0)
    masked, mask_strides = NO_MASK.value, q.stride()
    if mask is not None:
        masked = (BOOL_MASK if mask.dtype is torch.bool else ADDED_MASK).value
        mask = mask.expand(B, Hq, Tq, Tk)
        mask_strides = mask.stride()
    kernel = split_kernel if tma or vec > 1 else unaligned_kernel
    with torch.cuda.device_of(q):
        kernel[(B * Hkv * splits,)](
            q, *places, acc, sums, out, lengths if ragged else q, q if mask is None else mask,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *mask_strides, step, Hkv, group, Tq, Tk, window or 0, (scale or D**-0.5) * LOG2_E.value, splits,
            D, Dv,
            block, tile, cut.keys, least, splits == 1, masked,
            causal, window is not None, ragged, tma or (vec > 1 and block == D == Dv), vec, tma, pdl,
            machine.interpreting(), num_warps=cut.warps, num_stages=cut.stages, **overlap, **options,
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(B * Hq * Tq,)](
                acc, sums, out, lengths if ragged else q, step, Tk, Hkv, rows, Tq, window or 0, splits, Dv,
                block, max(2, triton.next_power_of_2(splits)), cut.keys, least, window is not None,
                ragged, pdl, num_warps=4, **overlap,
            )  # fmt: skip
    return out.to(q.dtype)


def _rows(q: Tensor, k: Tensor) -> int:
    return q.shape[1] // max(1, k.shape[1]) * q.shape[2]


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@operator("attention_split", _fake)
def split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """`run` with what torch's compiler may see of it."""
    return run(q, k, v, causal=causal, scale=scale, window=window, mask=mask, lengths=lengths, splits=splits)


@attention.register(
    "split",
    devices=("cuda",),
    interpreted=True,
    limits=(
        *LIMITS,
        Limit(
            f"for decoding: a group's heads times queries up to {MOST_ROWS[torch.float16]}, in float32"
            f" {MOST_ROWS[torch.float32]}",
            lambda q, k, v, **_: _rows(q, k) > MOST_ROWS.get(q.dtype, 0),
        ),
    ),
)
def triton_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention [B, Hq, Tq, Dv] of q [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv]; the
    contract is the op's. splits: the number of stretches, chosen by shape by default; any is right, one
    below 1 a ValueError.
    """
    if splits is not None and (not isinstance(splits, int) or splits < 1):
        raise ValueError(f"splits: got {splits!r}, accepted are None and whole numbers from 1")
    return split(q, k, v, causal, scale, window, mask, lengths, splits)
