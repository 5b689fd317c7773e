"""Residual addition and RMS normalization in one Triton kernel: a row whole in registers, x and residual
read once; or a longer row in steps, both read twice.

perf_lab.rows says how a call is cut and launched.
"""

# ruff: noqa: ANN001, ANN201, D403 -- parameters of a kernel have Triton's types, not Python's
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from perf_lab import machine
from perf_lab.add_rms_norm import add_rms_norm
from perf_lab.library import operator
from perf_lab.op import Limit
from perf_lab.rows import Cut, RowOp, as_rows, let_next_start, register, wait_for_inputs


@triton.jit(do_not_specialize=["rows"])
def whole_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    s_ptr,
    rows,
    columns,
    x_stride,
    residual_stride,
    eps,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """s [rows, columns] = x + residual, y = rms_norm of s, ROWS rows a program; columns <= BLOCK.

    Strides: elements from one row to the next; columns of x, residual, weight and all of y, s are contiguous.
    """
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    let_next_start(EARLY)
    s = (x + residual.to(tl.float32)).to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + row * columns + column, s, mask=inside)
    s = s.to(tl.float32)  # as rounded
    rstd = tl.rsqrt(tl.sum(s * s, 1) / columns + eps)  # [ROWS]
    y = s * rstd[:, None] * weight
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    s_ptr,
    columns,
    x_stride,
    residual_stride,
    eps,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The same, one row a program: first s and its sum of squares, then from x and residual again y.

    Not from s: what other threads of the program wrote is theirs to read only after a barrier.
    """
    wait_for_inputs(EARLY)
    x_ptr += tl.program_id(0).to(tl.int64) * x_stride
    residual_ptr += tl.program_id(0).to(tl.int64) * residual_stride
    y_ptr += tl.program_id(0).to(tl.int64) * columns
    s_ptr += tl.program_id(0).to(tl.int64) * columns
    block = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        s = (x + residual).to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + column, s, mask=column < columns)
        squares += s.to(tl.float32) * s.to(tl.float32)
    let_next_start(EARLY)
    rstd = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + block
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        s = (x + residual).to(s_ptr.dtype.element_ty).to(tl.float32)
        y = s * rstd * weight
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


KERNELS = RowOp("add_rms_norm", whole_rows, long_rows, (torch.bfloat16, torch.bfloat16))


def run(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, cut: Cut | None = None
) -> tuple[Tensor, Tensor]:
    """(y, s) of x, residual [..., C] with a given cut, or the one of this call; any cut is right."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    s = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y, s
    inputs, weight = (as_rows(x), as_rows(residual)), weight.contiguous()  # [R, C] each, [C]

    def launch(cut: Cut) -> None:
        KERNELS.run(inputs, (weight,), (y, s), (eps,), cut)

    if cut is None:
        KERNELS.tuned(launch, inputs[0], x.dtype, weight.dtype)
    else:
        launch(cut)
    return y, s


def _misread(x: Tensor, residual: Tensor, weight: Tensor, *_: object, **__: object) -> bool:
    """Whether Triton's interpreter reads wrong numbers here."""
    return machine.interpreting() and any(
        bool(((t != 0) & (t.abs() < torch.finfo(t.dtype).smallest_normal)).any())
        for t in (x, residual, weight)
        if t.dtype is torch.bfloat16
    )


LIMITS = (
    Limit("sums are float32, too coarse for float64", lambda x, *_, **__: x.dtype is torch.float64),
    Limit("Triton's interpreter misreads denormal bfloat16; such inputs are left to the GPU", _misread),
)


def _fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    empty = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2)]
    return empty[0], empty[1]


@add_rms_norm.register("triton", devices=("cuda",), interpreted=True, limits=LIMITS)
@operator("add_rms_norm", fake=_fake)
def triton_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """(RMS norm of s = x + residual [..., C] with weight [C], s); what is strided is copied first
    (rows that lie apart, each contiguous, are not).
    """
    return run(x, residual, weight, eps)


register(
    KERNELS,
    shapes=[(rows, columns) for columns in (1024, 2048, 4096, 8192, 16384) for rows in (1, 1024, 4096)],
    tensors=lambda rows, columns: ((rows, columns), (rows, columns), (columns,)),
    run=run,
)
