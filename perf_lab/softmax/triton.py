"""Softmax in Triton, in three forms: a row whole in registers, read once; a longer row in steps by one
program, read twice; and a longer row shared out over programs, read once.

perf_lab.rows says how a call is cut and launched. The third form is of this op
alone: 128 rows of a vocabulary's 262,144 logits leave a third of a GPU's
processors without work at a row each, and 131,072 columns are past what one
processor can hold until the row's sum is known.
"""

# ruff: noqa: ANN001, ANN201, ANN202, D403 -- parameters of a kernel have Triton's types, not Python's
# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from perf_lab import machine
from perf_lab.library import operator
from perf_lab.op import Limit
from perf_lab.rows import LARGEST, Cut, RowOp, as_rows, default_cut, register
from perf_lab.softmax import softmax

MOST_PARTS = 1024  # of a split row: each program reads all of their sums
PATIENCE = 2000  # looks at a counter in the L2 cache, under 1 us each, before a program stops waiting


@triton.jit
def _exp(x, ACCURATE: tl.constexpr):
    """exp(x) of float32 x <= 0 or NaN. The hardware rounds x * log2(e) to float32, which puts
    a relative error of |x| * 2^-24 on the result: too much for float32, invisible in 16 bits.
    """
    if not ACCURATE:
        return tl.exp(x)
    x = tl.where(x < -150.0, -150.0, x)  # exp(-150) is 0 in float32; -inf has no remainder
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = x - n * 0.693359375 - n * -2.12194440e-4  # n * 355/512 is exact: Cody and Waite
    return tl.exp2(n) * tl.exp(r)


@triton.jit
def _finite(top):
    """The maximum to subtract: -inf - -inf is NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _block(x_ptr, y_ptr, block, rows, columns, x_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows, whole."""
    ACCURATE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    weights = _exp(x - tl.max(x, 1)[:, None], ACCURATE)  # [ROWS, BLOCK]
    y = weights * (1.0 / tl.sum(weights, 1))[:, None]
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def whole_rows(
    x_ptr, y_ptr, rows, columns, x_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr
):
    """y [rows, columns] = softmax of x, ROWS rows a block; columns <= BLOCK.

    x_stride: elements from one row of x to the next; columns of x and all of y are contiguous.
    STAGES 0: a program a block; else programs loop over blocks, STAGES - 1 of them loaded ahead.
    """
    if STAGES == 0:
        _block(x_ptr, y_ptr, tl.program_id(0), rows, columns, x_stride, BLOCK, ROWS)
    else:
        blocks = tl.cdiv(rows, ROWS)
        for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
            _block(x_ptr, y_ptr, block, rows, columns, x_stride, BLOCK, ROWS)


@triton.jit
def long_rows(x_ptr, y_ptr, columns, x_stride, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """y [rows, columns] = softmax of x, one row a program: first maximum and sum, then the result."""
    ACCURATE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    x_ptr += tl.program_id(0).to(tl.int64) * x_stride
    y_ptr += tl.program_id(0).to(tl.int64) * columns
    block = tl.arange(0, BLOCK)
    top = -float("inf")  # the row's maximum so far
    shift = 0.0  # the same, but finite as long as all was -inf
    total = 0.0  # sum of exp(x - shift) so far
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        shift = _finite(higher)
        total = total * _exp(top - shift, ACCURATE) + tl.sum(_exp(x - shift, ACCURATE), 0)
        top = higher
    scale = 1.0 / total
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        y = _exp(x - shift, ACCURATE) * scale
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def _part(x_ptr, part, columns, BLOCK: tl.constexpr, ACCURATE: tl.constexpr):
    """One part of a row: its elements, and one word of their maximum (high half) and sum (low half).
    No word is 0: the sum is at least exp(0), and the maximum of a part of -inf is not 0.
    """
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)
    total = tl.sum(_exp(x - _finite(top), ACCURATE), 0)
    high = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return x, high | (total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def split_rows(
    x_ptr,
    y_ptr,
    words_ptr,
    columns,
    x_stride,
    parts,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """y [rows, columns] = softmax of x, one part of BLOCK columns a program, kept in registers while the
    programs of a row tell each other their maxima and sums.

    words_ptr: [rows, 1 + parts] int64, zeros: how many parts are there, then the word of each (see `_part`).
    PADDED: a power of two, at least `parts`.
    A program waits for those beside it, but nothing says that they run: after PATIENCE looks it works
    out what is missing itself. So it ends in any order of programs, one after the other included.
    """
    ACCURATE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    x_ptr += row * x_stride
    y_ptr += row * columns
    words_ptr += row * (parts + 1)
    x, word = _part(x_ptr, part, columns, BLOCK, ACCURATE)
    tl.atomic_xchg(words_ptr + 1 + part, word, sem="relaxed")
    there = tl.atomic_add(words_ptr, 1, sem="acq_rel") + 1
    looks = 0
    while (there < parts) & (looks < PATIENCE):
        there = tl.atomic_add(words_ptr, 0, sem="acquire")
        looks += 1
    if there < parts:
        for other in range(parts):
            if tl.atomic_add(words_ptr + 1 + other, 0, sem="relaxed") == 0:
                _, word = _part(x_ptr, other, columns, BLOCK, ACCURATE)
                tl.atomic_xchg(words_ptr + 1 + other, word, sem="relaxed")
    tl.debug_barrier()  # one thread saw, all may read
    index = tl.arange(0, PADDED)
    words = tl.load(words_ptr + 1 + index, mask=index < parts, other=0, volatile=True)
    tops = tl.where(index < parts, (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    totals = tl.where(index < parts, words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    shift = _finite(tl.max(tops, 0))
    scale = 1.0 / tl.sum(totals * _exp(tops - shift, ACCURATE), 0)
    column = part * BLOCK + tl.arange(0, BLOCK)
    y = _exp(x - shift, ACCURATE) * scale
    tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


def default(columns: int, rows: int) -> Cut:
    """The cut without tuning: rows past the registers are split, however many."""
    return Cut(8192, 8, split=1) if columns > LARGEST else default_cut(columns, rows)


KERNELS = RowOp("softmax", whole_rows, long_rows, default=default)


def run(x: Tensor, cut: Cut | None = None) -> Tensor:
    """Softmax of x [..., C] with a given cut, or the one of this call; any cut is right."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    flat = as_rows(x)  # [R, C]
    cut = cut or KERNELS.cut(flat, x.dtype)
    parts = math.ceil(flat.shape[1] / cut.block)
    if cut.split and 1 < parts <= MOST_PARTS and flat.shape[0] * parts < 2**31:
        _split(flat, y, cut, parts)
    else:
        KERNELS.run((flat,), (), (y,), (), cut)
    return y


def _split(x: Tensor, y: Tensor, cut: Cut, parts: int) -> None:
    rows, columns = x.shape
    words = torch.zeros(rows, 1 + parts, dtype=torch.int64, device=x.device)
    patience: Any = 1 if machine.interpreting() else PATIENCE  # the interpreter runs one program at a time
    padded = triton.next_power_of_2(parts)
    with torch.cuda.device_of(x):
        split_rows[(rows * parts,)](
            *(x, y, words, columns, x.stride(0), parts),
            *(cut.block, padded, patience),
            num_warps=cut.warps,
        )


NO_FLOAT64 = Limit("sums are float32, too coarse for float64", lambda x: x.dtype is torch.float64)


@softmax.register("triton", devices=("cuda",), interpreted=True, limits=(NO_FLOAT64,))
@operator("softmax", fake=lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
def triton_softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis of x [..., C]; a last axis that is not contiguous is copied first."""
    return run(x)


register(
    KERNELS,
    shapes=[
        *((rows, columns) for columns in (1024, 2048, 4096, 8192, 16384, 32768) for rows in (1, 1024, 4096)),
        *((rows, columns) for columns in (131072, 262144) for rows in (1, 64, 256)),
    ],
    tensors=lambda rows, columns: ((rows, columns),),
    run=run,
    split=True,
)
