"""What the Triton kernels of attention share: one tile of queries over a range of keys, and how it is fed.

A tile loads its keys by pointers, or through a tensor descriptor: then the GPU's copy engine (Hopper's
TMA) computes the addresses, clips what lies outside, and no thread is busy with either.

Every size is an argument of the compiled kernel, but the padded head dim is a constant, so that a new head
dim, length or stride does not mean a new compilation.
"""

# ruff: noqa: ANN001, ANN201, D403 -- a kernel has Triton's types and branches, not Python's
# mypy: allow-untyped-defs, allow-incomplete-defs

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from perf_lab import machine
from perf_lab.op import Limit

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)  # of a mask's numbers in log2: in that unit the lowest float32 would be -inf
# Of float32 inputs: three products of their tf32 parts, which leave out what is below 2^-22 of a product.
PRECISION = tl.constexpr("tf32x3")
NO_MASK, BOOL_MASK, ADDED_MASK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
VECTOR = 16  # bytes, of the widest load
LARGEST_HEAD = 256
LEAST_BLOCK = 64  # of a head dim, padded: fewer kernels, and a smaller head dim is rare

INTERPRETED_PROGRAMS = 4096

LIMITS = (
    Limit(
        f"interpreted, up to {INTERPRETED_PROGRAMS} heads of all rows: each takes some ms",
        lambda q, *_, **__: machine.interpreting() and q.shape[0] * q.shape[1] > INTERPRETED_PROGRAMS,
    ),
    Limit("sums are float32, too coarse for float64", lambda q, *_, **__: q.dtype is torch.float64),
    Limit(f"head dims up to {LARGEST_HEAD}", lambda q, k, v, **_: max(q.shape[3], v.shape[3]) > LARGEST_HEAD),
)


@triton.jit
def over_keys(
    acc,
    total,
    top,
    q,
    k,
    v,
    k_row,
    v_row,
    batch,
    head,
    start,
    stop,
    keys,
    last_seen,
    window,
    mask_at,
    mask_step,
    scale,
    D,
    DV,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    EDGE: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    FULL: tl.constexpr,
    TMA: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add the keys start..stop, N at a time, to the running sums of one tile of M queries.

    acc [M, BLOCK], total and top [M]: weights times v, weights, and the highest score in log2. q [M, BLOCK].
    k, v: pointers to the head's first key, or, TMA, descriptors of all. EDGE: some of these keys are not
    seen by some query; last_seen [M] is the last that each one sees. MASK: NO_MASK, or what lies at the
    pointers mask_at [M], mask_step elements apart from key to key (with EDGE). FULL: D = DV = BLOCK.
    UPCAST: q is float32 and so must the rest be, since the interpreter multiplies bfloat16 as bit patterns.
    """
    d = tl.arange(0, BLOCK)
    for begin in tl.range(start, stop, N):
        begin = tl.multiple_of(begin, N)
        j = begin + tl.arange(0, N)
        inside = j < keys
        if TMA:
            k_tile = k.load([batch, head, begin, 0]).reshape(N, BLOCK).T  # [BLOCK, N]
        else:
            k_at = k + j.to(tl.int64)[None, :] * k_row + d[:, None]
            if EDGE and FULL:
                k_tile = tl.load(k_at, mask=inside[None, :], other=0.0)
            elif EDGE:
                k_tile = tl.load(k_at, mask=inside[None, :] & (d < D)[:, None], other=0.0)
            elif FULL:
                k_tile = tl.load(k_at)
            else:
                k_tile = tl.load(k_at, mask=(d < D)[:, None], other=0.0)
        if UPCAST:
            k_tile = k_tile.to(tl.float32)
        scores = tl.dot(q, k_tile, input_precision=PRECISION)  # [M, N]
        if EDGE:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (j[None, :] <= last_seen[:, None])
            if WINDOW:
                seen = seen & (j[None, :] > last_seen[:, None] - window)
            scores = scores * scale
            if MASK != NO_MASK:
                mask = tl.load(
                    mask_at[:, None] + j[None, :] * mask_step, mask=inside[None, :], other=0
                )  # [M, N]
                if MASK == BOOL_MASK:
                    seen = seen & (mask != 0)
                else:
                    mask = mask.to(tl.float32)
                    scores += tl.where(mask == -float("inf"), mask, tl.maximum(mask * LOG2_E, LOWEST))
            scores = tl.where(seen, scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is NaN
            weights = tl.exp2(scores - shift[:, None])
        else:
            higher = tl.maximum(top, tl.max(scores, 1) * scale)
            shift = higher
            weights = tl.exp2(scores * scale - shift[:, None])
        faded = tl.exp2(top - shift)
        total = total * faded + tl.sum(weights, 1)
        acc = acc * faded[:, None]
        top = higher
        if TMA:
            v_tile = v.load([batch, head, begin, 0]).reshape(N, BLOCK)
            if EDGE and RAGGED:  # what the descriptor does not clip may hold NaN, and 0 * NaN is NaN
                v_tile = tl.where(inside[:, None], v_tile, 0.0)
        else:
            v_at = v + j.to(tl.int64)[:, None] * v_row + d[None, :]
            if EDGE and FULL:
                v_tile = tl.load(v_at, mask=inside[:, None], other=0.0)
            elif EDGE:
                v_tile = tl.load(v_at, mask=inside[:, None] & (d < DV)[None, :], other=0.0)
            elif FULL:
                v_tile = tl.load(v_at)
            else:
                v_tile = tl.load(v_at, mask=(d < DV)[None, :], other=0.0)
        weights = weights.to(v_tile.dtype)
        if UPCAST:
            weights, v_tile = weights.to(tl.float32), v_tile.to(tl.float32)
        acc += tl.dot(weights, v_tile, input_precision=PRECISION)
    return acc, total, top


def result_for(q: Tensor, v: Tensor) -> Tensor:
    """Memory for the result [B, Hq, Tq, Dv], for the interpreter in float32: its own rounding to bfloat16 is
    wrong for denormals.
    """
    dtype = torch.float32 if machine.interpreting() else q.dtype
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)


def block_for(q: Tensor, v: Tensor) -> int:
    """The head dim, padded to a power of two."""
    return max(LEAST_BLOCK, triton.next_power_of_2(max(q.shape[3], v.shape[3])))


def rows_whole(x: Tensor) -> Tensor:
    """The tensor, or a copy where the elements of a row do not follow one another."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def aligned(*tensors: Tensor) -> bool:
    """Whether every row begins and ends at a multiple of VECTOR bytes."""
    return all(
        x.data_ptr() % VECTOR == 0
        and x.shape[3] * x.element_size() % VECTOR == 0
        and all(
            n == 1 or stride * x.element_size() % VECTOR == 0
            for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
        )
        for x in tensors
    )


def describable(*tensors: Tensor) -> bool:
    """Whether the copy engine takes them: aligned, not float32 (nor do the tensor cores), not expanded."""
    return aligned(*tensors) and all(
        x.dtype is not torch.float32
        and all(n == 1 or s > 0 for n, s in zip(x.shape, x.stride(), strict=True))
        for x in tensors
    )


def described(x: Tensor, rows: int, block: int) -> TensorDescriptor:
    """x [B, H, T, D] for tiles of `rows` rows of one head, D padded with zeros to `block`."""
    step = VECTOR // x.element_size()
    strides = [s if n > 1 else max(step, s // step * step) for n, s in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, rows, block])


@functools.cache
def capability(device: torch.device) -> int:
    """The major number of a GPU's compute capability; 9 in the interpreter, which knows descriptors too."""
    return 9 if machine.interpreting() else torch.cuda.get_device_capability(device)[0]
