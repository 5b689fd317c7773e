"""RMS normalization in Triton: rows of up to LARGEST columns stay in registers, longer ones are read twice.

Reads and writes of a short row are the least there are; a long row's second
read mostly hits the L2 cache. No autotuning: `launch` is a plain function.
"""

# ruff: noqa: ANN001, ANN201, D403 -- parameters of a kernel have Triton's types, not Python's
# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perf_lab import machine
from perf_lab.op import Limit
from perf_lab.rms_norm import rms_norm

LARGEST = 32768  # columns of a row that 32 warps keep in registers, 32 float32 a thread
LOOP_BLOCK = 8192  # columns of one step through a longer row; two stages take 66 kB of shared memory


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


@triton.jit(do_not_specialize=["rows"])
def short_rows(
    x_ptr, weight_ptr, y_ptr, rows, columns, x_stride, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """y [rows, columns] = rms_norm of x, ROWS rows a program; columns <= BLOCK.

    x_stride: elements from one row of x to the next; columns of x, weight and all of y are contiguous.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)  # [ROWS]
    y = x * rstd[:, None] * weight
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_rows(x_ptr, weight_ptr, y_ptr, columns, x_stride, eps, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """y [rows, columns] = rms_norm of x, one row a program: first the sum of squares, then the result."""
    x_ptr += tl.program_id(0).to(tl.int64) * x_stride
    y_ptr += tl.program_id(0).to(tl.int64) * columns
    block = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        y = x * rstd * weight
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


def run(x: Tensor, weight: Tensor, eps: float, cut: Launch) -> Tensor:
    """RMS norm of x [..., C] with a given cut; any cut is right."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    columns = x.shape[-1]
    flat = x.reshape(-1, columns)  # [R, C]: a view where the strides allow one
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    weight = weight.contiguous()  # [C]
    rows, stride = flat.shape[0], flat.stride(0)
    with torch.cuda.device_of(x):
        if columns <= cut.block:
            grid = (math.ceil(rows / cut.rows),)
            short_rows[grid](
                flat, weight, y, rows, columns, stride, eps, cut.block, cut.rows, num_warps=cut.warps
            )
        else:
            long_rows[(rows,)](
                flat, weight, y, columns, stride, eps, cut.block, cut.stages, num_warps=cut.warps
            )
    return y


def _misread(x: Tensor, weight: Tensor, *_: object, **__: object) -> bool:
    """Whether Triton's interpreter reads wrong numbers here."""
    return machine.interpreting() and any(
        bool(((t != 0) & (t.abs() < torch.finfo(t.dtype).smallest_normal)).any())
        for t in (x, weight)
        if t.dtype is torch.bfloat16
    )


LIMITS = (
    Limit("sums are float32, too coarse for float64", lambda x, *_, **__: x.dtype is torch.float64),
    Limit("Triton's interpreter misreads denormal bfloat16; such inputs are left to the GPU", _misread),
)


@rms_norm.register("triton", devices=("cuda",), interpreted=True, limits=LIMITS)
def triton_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last axis of x [..., C] with weight [C]; what is strided is copied first
    (rows that lie apart, each contiguous, are not).
    """
    columns = max(1, x.shape[-1])
    return run(x, weight, eps, launch(columns, x.numel() // columns))
