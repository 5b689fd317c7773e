"""Softmax in Triton, in three forms: a row whole in registers, read once; a longer row in steps by one
program, read twice; and a longer row shared out over programs, read a second time from the L2 cache.

perf_lab.rows says how a call is cut and launched. The third form is of this op
alone: with 128 rows of a vocabulary's 262,144 logits, a row a program leaves
most of a GPU's processors without enough loads in flight.
"""

# ruff: noqa: ANN001, ANN201, ANN202, D403 -- parameters of a kernel have Triton's types, not Python's
# mypy: disable-error-code="no-untyped-def"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from perf_lab import machine
from perf_lab.library import operator
from perf_lab.op import Limit
from perf_lab.rows import (
    LARGEST,
    Cut,
    RowOp,
    as_rows,
    default_cut,
    early,
    let_next_start,
    processors,
    register,
    wait_for_inputs,
)
from perf_lab.softmax import softmax

MOST_PARTS = 1024  # of a split row: each of its blocks reads the words of all
PATIENCE = 2000  # looks at a row's words in the L2 cache, about 1 us each, before a program helps itself


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


@triton.jit(do_not_specialize=["rows"])
def whole_rows(
    x_ptr, y_ptr, rows, columns, x_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):
    """y [rows, columns] = softmax of x, ROWS rows a program; columns <= BLOCK.

    x_stride: elements from one row of x to the next; columns of x and all of y are contiguous.
    """
    ACCURATE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    let_next_start(EARLY)
    weights = _exp(x - tl.max(x, 1)[:, None], ACCURATE)  # [ROWS, BLOCK]
    y = weights * (1.0 / tl.sum(weights, 1))[:, None]
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_rows(
    x_ptr, y_ptr, columns, x_stride, BLOCK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr
):
    """y [rows, columns] = softmax of x, one row a program: first maximum and sum, then the result."""
    ACCURATE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    wait_for_inputs(EARLY)
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
    let_next_start(EARLY)
    scale = 1.0 / total
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        y = _exp(x - shift, ACCURATE) * scale
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def _word(x, ACCURATE: tl.constexpr):
    """One word of what a part of a row adds to it: maximum (high half) and sum (low half).
    None is 0: the sum is at least exp(0), or the maximum of a part of -inf is not 0.
    """
    top = tl.max(x, 0)
    total = tl.sum(_exp(x - _finite(top), ACCURATE), 0)
    high = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | (total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _publish_missing(x_ptr, words_ptr, columns, parts, BLOCK: tl.constexpr, ACCURATE: tl.constexpr):
    """The words of a row that are not there, worked out by this program as the others would."""
    for part in range(parts):
        if tl.atomic_add(words_ptr + part, 0, sem="relaxed") == 0:
            column = part * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
            tl.atomic_xchg(words_ptr + part, _word(x, ACCURATE), sem="relaxed")
    tl.debug_barrier()  # one thread wrote, all may read


@triton.jit
def _row_of_words(words_ptr, parts, PADDED: tl.constexpr):
    """The words of a row [PADDED], and how many of them are missing: the same number in every thread,
    because no word is read by two (PADDED is twice the threads, or more).
    """
    index = tl.arange(0, PADDED)
    words = tl.load(words_ptr + index, mask=index < parts, other=0, volatile=True)
    return words, tl.sum(((words == 0) & (index < parts)).to(tl.int32), 0)


@triton.jit
def split_rows(
    x_ptr,
    y_ptr,
    words_ptr,
    blocks,
    columns,
    x_stride,
    parts,
    lag,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    PATIENCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y [rows, columns] = softmax of x, whose rows are `parts` blocks of BLOCK columns; the programs share
    all blocks. Each reads a block and publishes its maximum and sum; lag blocks later it comes back,
    reads the words of the whole row and the block again (from the L2 cache), and writes the result.

    blocks: rows * parts. words_ptr: [rows, parts] int64, zeros (see `_word`).
    So `lag` blocks of every program are in the L2 cache at a time. By then the other programs have mostly
    published, but nothing says that they even run: after PATIENCE looks a program works out what is
    missing itself. So it ends in any order of programs, one after the other included.
    """
    ACCURATE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    wait_for_inputs(EARLY)
    first, programs = tl.program_id(0), tl.num_programs(0)
    mine = tl.cdiv(blocks - first, programs)
    for step in range(mine + lag):
        block = first + step * programs
        column = block % parts * BLOCK + tl.arange(0, BLOCK)
        inside = column < tl.where(step < mine, columns, 0)
        ahead = tl.load(
            x_ptr + (block // parts).to(tl.int64) * x_stride + column, mask=inside, other=-float("inf")
        )
        if step >= lag:
            done = block - lag * programs
            row = (done // parts).to(tl.int64)
            column = done % parts * BLOCK + tl.arange(0, BLOCK)
            words, missing = _row_of_words(words_ptr + row * parts, parts, PADDED)
            looks = 0
            while (missing > 0) & (looks < PATIENCE):
                words, missing = _row_of_words(words_ptr + row * parts, parts, PADDED)
                looks += 1
            if missing > 0:
                _publish_missing(
                    x_ptr + row * x_stride, words_ptr + row * parts, columns, parts, BLOCK, ACCURATE
                )
                words, missing = _row_of_words(words_ptr + row * parts, parts, PADDED)
            there = words != 0
            tops = tl.where(there, (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
            totals = tl.where(there, words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
            shift = _finite(tl.max(tops, 0))
            scale = 1.0 / tl.sum(totals * _exp(tops - shift, ACCURATE), 0)
            x = tl.load(x_ptr + row * x_stride + column, mask=column < columns, other=-float("inf"))
            y = _exp(x.to(tl.float32) - shift, ACCURATE) * scale
            tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)
        if step < mine:
            tl.atomic_xchg(words_ptr + block, _word(ahead.to(tl.float32), ACCURATE), sem="relaxed")


@triton.jit
def clear(words_ptr, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Zeros."""
    wait_for_inputs(EARLY)
    let_next_start(EARLY)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words_ptr + index, tl.zeros([BLOCK], tl.int64), mask=index < count)


def default(columns: int, rows: int) -> Cut:
    """The cut without tuning: rows past the registers are split, however many."""
    return Cut(4096, 4, stages=2, split=8) if columns > LARGEST else default_cut(columns, rows)


KERNELS = RowOp("softmax", whole_rows, long_rows, default=default)


def run(x: Tensor, cut: Cut | None = None) -> Tensor:
    """Softmax of x [..., C] with a given cut, or the one of this call; any cut is right."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    flat = as_rows(x)  # [R, C]

    def launch(cut: Cut) -> None:
        parts = math.ceil(flat.shape[1] / cut.block)
        if cut.split and 1 < parts <= MOST_PARTS and flat.shape[0] * parts < 2**30:
            _split(flat, y, cut, parts)
        else:
            KERNELS.run((flat,), (), (y,), (), cut)

    if cut is None:
        KERNELS.tuned(launch, flat, x.dtype)
    else:
        launch(cut)
    return y


def _split(x: Tensor, y: Tensor, cut: Cut, parts: int) -> None:
    """x [R, C] in blocks that programs share, `cut.split` programs a processor."""
    blocks = x.shape[0] * parts
    words = torch.empty(blocks, dtype=torch.int64, device=x.device)
    start_early = early(x.device)
    how = {"launch_pdl": True} if start_early else {}
    patience = 1 if machine.interpreting() else PATIENCE  # the interpreter runs one program at a time
    padded = max(triton.next_power_of_2(parts), 64 * cut.warps)
    programs = min(blocks, cut.split * processors(x.device))
    with torch.cuda.device_of(x):
        clear[(math.ceil(blocks / 1024),)](words, blocks, 1024, start_early, **how)
        split_rows[(programs,)](
            *(x, y, words, blocks, x.shape[1], x.stride(0), parts, cut.stages),
            *(cut.block, padded, patience, start_early),
            **{"num_warps": cut.warps, **how},
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
