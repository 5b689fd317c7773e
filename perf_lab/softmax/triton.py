"""Softmax in Triton, in three forms: a row whole in registers, read once; a longer row in steps by one
program, read twice; and a longer row shared out over programs, read a second time from the L2 cache.

perf_lab.rows says how a call is cut and launched. The third form is of this op
alone: with 128 rows of a vocabulary's 262,144 logits, a row a program leaves
a GPU's processors without enough loads in flight.
"""

# ruff: noqa: ANN001, ANN201, ANN202, D403 -- parameters of a kernel have Triton's types, not Python's
# mypy: disable-error-code="no-untyped-def"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    register,
    wait_for_inputs,
)
from perf_lab.softmax import softmax

MOST_PARTS = 1024  # of a split row: each of its blocks reads the maxima and sums of all


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


@triton.jit(do_not_specialize=["parts", "read_first", "read_count", "write_first", "write_count"])
def split_rows(
    x_ptr,
    y_ptr,
    tops_ptr,
    sums_ptr,
    columns,
    x_stride,
    parts,
    read_first,
    read_count,
    write_first,
    write_count,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One lap of y [rows, columns] = softmax of x, whose rows are `parts` blocks of BLOCK columns: maximum
    and sum of read_count blocks from read_first on, and the result of write_count blocks from
    write_first on, whose rows' maxima and sums earlier laps have written. Programs of both kinds alternate.

    tops_ptr, sums_ptr: [rows, parts] float32. PADDED: a power of two, at least `parts`.
    """
    ACCURATE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    wait_for_inputs(EARLY)
    let_next_start(EARLY)
    program, both = tl.program_id(0), 2 * tl.minimum(read_count, write_count)
    writes = tl.where(program < both, program % 2 == 1, write_count > read_count)
    index = tl.where(program < both, program // 2, program - both // 2)
    block = index + tl.where(writes, write_first, read_first)
    row = (block // parts).to(tl.int64)
    column = block % parts * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    if writes:
        part = tl.arange(0, PADDED)
        # from the L2 cache: this processor's own may hold the lines as they were
        tops = tl.load(
            tops_ptr + row * parts + part, mask=part < parts, other=-float("inf"), cache_modifier=".cg"
        )
        sums = tl.load(sums_ptr + row * parts + part, mask=part < parts, other=0.0, cache_modifier=".cg")
        shift = _finite(tl.max(tops, 0))
        scale = 1.0 / tl.sum(sums * _exp(tops - shift, ACCURATE), 0)
        y = _exp(x - shift, ACCURATE) * scale
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)
    else:
        top = tl.max(x, 0)
        tl.store(tops_ptr + block, top)
        tl.store(sums_ptr + block, tl.sum(_exp(x - _finite(top), ACCURATE), 0))


def default(columns: int, rows: int) -> Cut:
    """The cut without tuning: rows past the registers are split, however many."""
    return Cut(8192, 16, split=12 * 1024) if columns > LARGEST else default_cut(columns, rows)


KERNELS = RowOp("softmax", whole_rows, long_rows, default=default, revision=2)


def run(x: Tensor, cut: Cut | None = None) -> Tensor:
    """Softmax of x [..., C] with a given cut, or the one of this call; any cut is right."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
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
    """x [R, C] in laps of `cut.split` KiB: each reads its rows and writes those of the lap before, which
    the L2 cache still holds.
    """
    rows, columns = x.shape
    tops, sums = torch.empty(2, rows, parts, dtype=torch.float32, device=x.device)
    start_early = early(x.device)
    how = {"num_warps": cut.warps, **({"launch_pdl": True} if start_early else {})}
    lap = parts * max(1, cut.split * 1024 // (columns * x.element_size()))  # blocks
    blocks = rows * parts
    with torch.cuda.device_of(x):
        for start in range(0, blocks + lap, lap):
            read = min(lap, max(0, blocks - start))
            write = min(lap, blocks - start + lap) if start else 0
            split_rows[(read + write,)](
                *(x, y, tops, sums, columns, x.stride(0), parts, start, read, start - lap, write),
                *(cut.block, triton.next_power_of_2(parts), start_early),
                **how,
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
