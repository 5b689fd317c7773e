"""RMS normalization in Triton: a row whole in registers, read once; or a longer row in steps, read twice.

perf_lab.rows says how a call is cut and launched.
"""

# ruff: noqa: ANN001, ANN201, D403 -- parameters of a kernel have Triton's types, not Python's
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from perf_lab import machine
from perf_lab.library import operator
from perf_lab.op import Limit
from perf_lab.rms_norm import rms_norm
from perf_lab.rows import Cut, RowOp, as_rows, let_next_start, register, wait_for_inputs


@triton.jit(do_not_specialize=["rows"])
def whole_rows(
    x_ptr,
    weight_ptr,
    y_ptr,
    rows,
    columns,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y [rows, columns] = rms_norm of x, ROWS rows a program; columns <= BLOCK.

    x_stride: elements from one row of x to the next; columns of x, weight and all of y are contiguous.
    """
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    let_next_start(EARLY)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)  # [ROWS]
    y = x * rstd[:, None] * weight
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_rows(
    x_ptr,
    weight_ptr,
    y_ptr,
    columns,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y [rows, columns] = rms_norm of x, one row a program: first the sum of squares, then the result."""
    wait_for_inputs(EARLY)
    x_ptr += tl.program_id(0).to(tl.int64) * x_stride
    y_ptr += tl.program_id(0).to(tl.int64) * columns
    block = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        squares += x * x
    let_next_start(EARLY)
    rstd = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        y = x * rstd * weight
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


KERNELS = RowOp("rms_norm", whole_rows, long_rows, (torch.bfloat16, torch.bfloat16))


def run(x: Tensor, weight: Tensor, eps: float = 1e-6, cut: Cut | None = None) -> Tensor:
    """RMS norm of x [..., C] with a given cut, or the one of this call; any cut is right."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    flat, weight = as_rows(x), weight.contiguous()  # [R, C], [C]

    def launch(cut: Cut) -> None:
        KERNELS.run((flat,), (weight,), (y,), (eps,), cut)

    if cut is None:
        KERNELS.tuned(launch, flat, x.dtype, weight.dtype)
    else:
        launch(cut)
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
@operator("rms_norm", fake=lambda x, weight, eps=1e-6: torch.empty(x.shape, dtype=x.dtype, device=x.device))
def triton_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last axis of x [..., C] with weight [C]; what is strided is copied first
    (rows that lie apart, each contiguous, are not).
    """
    return run(x, weight, eps)


register(
    KERNELS,
    shapes=[(rows, columns) for columns in (1024, 2048, 4096, 8192, 16384) for rows in (1, 1024, 4096)],
    tensors=lambda rows, columns: ((rows, columns), (columns,)),
    run=run,
)
