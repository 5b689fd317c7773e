"""Softmax in Triton: rows of up to LARGEST columns stay in registers, longer ones are read twice.

Reads and writes of a short row are the least there are; a long row's second
read mostly hits the L2 cache. No autotuning: `launch` is a plain function.
"""

# ruff: noqa: ANN001, ANN201, ANN202, D403 -- parameters of a kernel have Triton's types, not Python's
# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perf_lab.op import Limit
from perf_lab.softmax import softmax

LARGEST = 32768  # columns of a row that 32 warps keep in registers, 32 float32 a thread
LOOP_BLOCK = 8192  # columns of one step through a longer row; two stages take 33 kB of shared memory


class Launch(NamedTuple):
    """How a kernel is cut: columns of a block (a power of two), warps of a program, its rows;
    for rows longer than a block, how many blocks are loaded ahead, plus one.
    """

    block: int
    warps: int
    rows: int
    stages: int = 1


def launch(columns: int, rows: int) -> Launch:
    """The cut for `rows` rows of `columns` columns, from sizes alone."""
    if columns > LARGEST:
        return Launch(LOOP_BLOCK, 16, 1, stages=2)
    block = max(16, triton.next_power_of_2(columns))
    packed = max(1, min(4096 // block, rows // 256))  # keep 256 programs, for as many processors
    packed = 1 << (packed.bit_length() - 1)
    warps = block * packed // 1024  # 32 elements a thread: four loads of 16 bytes in bfloat16
    return Launch(block, min(max(warps, 4), 32), packed)


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


@triton.jit(do_not_specialize=["rows"])
def short_rows(x_ptr, y_ptr, rows, columns, x_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """y [rows, columns] = softmax of x, ROWS rows a program; columns <= BLOCK.

    x_stride: elements from one row of x to the next; columns of x and all of y are contiguous.
    """
    ACCURATE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    weights = _exp(x - tl.max(x, 1)[:, None], ACCURATE)  # [ROWS, BLOCK]
    y = weights * (1.0 / tl.sum(weights, 1))[:, None]
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_rows(x_ptr, y_ptr, columns, x_stride, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """y [rows, columns] = softmax of x, one row a program: first maximum and sum, then the result."""
    ACCURATE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    x_ptr += tl.program_id(0).to(tl.int64) * x_stride
    y_ptr += tl.program_id(0).to(tl.int64) * columns
    block = tl.arange(0, BLOCK)
    top = -float("inf")  # the row's maximum so far
    shift = 0.0  # the same, but finite as long as all was -inf: -inf - -inf is NaN
    total = 0.0  # sum of exp(x - shift) so far
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * _exp(top - shift, ACCURATE) + tl.sum(_exp(x - shift, ACCURATE), 0)
        top = higher
    scale = 1.0 / total
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        y = _exp(x - shift, ACCURATE) * scale
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


def run(x: Tensor, cut: Launch) -> Tensor:
    """Softmax of x [..., C] with a given cut; any cut is right."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    columns = x.shape[-1]
    flat = x.reshape(-1, columns)  # [R, C]: a view where the strides allow one
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    rows, stride = flat.shape[0], flat.stride(0)
    with torch.cuda.device_of(x):
        if columns <= cut.block:
            grid = (math.ceil(rows / cut.rows),)
            short_rows[grid](flat, y, rows, columns, stride, cut.block, cut.rows, num_warps=cut.warps)
        else:
            long_rows[(rows,)](flat, y, columns, stride, cut.block, cut.stages, num_warps=cut.warps)
    return y


NO_FLOAT64 = Limit("sums are float32, too coarse for float64", lambda x: x.dtype is torch.float64)


@softmax.register("triton", devices=("cuda",), interpreted=True, limits=(NO_FLOAT64,))
def triton_softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis of x [..., C]; a last axis that is not contiguous is copied first."""
    columns = max(1, x.shape[-1])
    return run(x, launch(columns, x.numel() // columns))
