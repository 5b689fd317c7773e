"""The decode step with its small operations merged into Triton kernels.

A layer is its four matrix products, two norms that add the residual, one kernel that turns q and k and stores
k and v, the attention, and with SwiGLU one kernel for silu and product.
"""

# ruff: noqa: ANN001, ANN202, D403 -- parameters of a kernel have Triton's types, not Python's
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from perf_lab.add_rms_norm import add_rms_norm
from perf_lab.model.step import decode_step
from perf_lab.rms_norm import rms_norm


@decode_step.register("fused", devices=("cuda",), interpreted=True)
def fused(model: Any, tokens: Tensor, slots: Any, positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """With the small operations merged into Triton kernels."""
    batch = tokens.shape[0]
    x = model.embedding(tokens)  # [B, 1, W], the residual stream
    if model.position is not None:
        x = x + model.position.weight[positions]
    turn = None if model.rotary is None else model.rotary(positions)
    first = model.layers[0].attention_norm
    y = _norm(x, first)
    for layer, then in zip(
        model.layers, (*(a.attention_norm for a in model.layers[1:]), model.norm), strict=True
    ):
        attention = layer.attention
        q = _store(attention.qkv(y), turn, attention.heads, slots, attention.index)
        seen = slots.look(attention.index, q, window=attention.window, mask=mask)  # [B, H, 1, D]
        y, x = _add_norm(attention.out(seen.reshape(batch, 1, -1)), x, layer.mlp_norm)
        y, x = _add_norm(_mlp(layer.mlp, y), x, then)
    return model.head(y)


def _store(qkv: Tensor, turn: tuple[Tensor, Tensor] | None, heads: int, slots: Any, layer: int) -> Tensor:
    """`turn_and_store`, by slots that know where to."""
    if hasattr(slots, "turn_and_store"):
        return slots.turn_and_store(layer, qkv, turn, heads)
    return turn_and_store(qkv, turn, heads, slots.memory(layer), slots.at)


def _norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return rms_norm["triton"].fn(x, norm.weight, norm.eps)


def _add_norm(delta: Tensor, x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = delta + x."""
    return add_rms_norm["triton"].fn(delta, x, norm.weight, norm.eps)


def _mlp(mlp: Any, y: Tensor) -> Tensor:
    return mlp.down(silu_product(mlp.gate_up(y))) if hasattr(mlp, "gate_up") else mlp(y)


@triton.jit
def _turn_and_store(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    at_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    qkv_row,
    turn_row,
    k_batch,
    k_head,
    k_slot,
    v_batch,
    v_head,
    v_slot,
    heads,
    kv_heads,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TURN: tl.constexpr,
):
    """A program a row and head of qkv [B, (H + 2 Hkv) D]: q to q_ptr [B, H, D], k and v to their slot."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, BLOCK)
    inside = j < D
    source = qkv_ptr + row * qkv_row + head * D
    x = tl.load(source + j, mask=inside, other=0.0)
    slot = tl.load(at_ptr).to(tl.int64)
    if head < heads + kv_heads:
        if TURN:
            other = tl.load(source + (j + D // 2) % D, mask=inside, other=0.0).to(tl.float32)
            cos = tl.load(cos_ptr + row * turn_row + j, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + row * turn_row + j, mask=inside, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * cos + other * sin).to(q_ptr.dtype.element_ty)
        if head < heads:
            tl.store(q_ptr + (row * heads + head) * D + j, x, mask=inside)
        else:
            tl.store(k_ptr + row * k_batch + (head - heads) * k_head + slot * k_slot + j, x, mask=inside)
    else:
        head -= heads + kv_heads
        tl.store(v_ptr + row * v_batch + head * v_head + slot * v_slot + j, x, mask=inside)


def turn_and_store(
    qkv: Tensor, turn: tuple[Tensor, Tensor] | None, heads: int, memory: tuple[Tensor, Tensor], at: Tensor
) -> Tensor:
    """Turn the queries and keys of qkv [B, 1, (H + 2 Hkv) D] by (cos, sin) [..., D], put keys and values into
    slot `at` [1] of memory, two [B, Hkv, capacity, D] whose last axis is contiguous, and give q [B, H, 1, D].

    The products are in float32 and rounded once.
    """
    keys, values = memory
    batch, kv_heads, _, dim = keys.shape
    qkv = qkv.view(batch, -1)
    q = torch.empty(batch, heads, 1, dim, dtype=qkv.dtype, device=qkv.device)
    cos, sin = (qkv, qkv) if turn is None else (table.reshape(-1, dim).contiguous() for table in turn)
    _turn_and_store[batch, heads + 2 * kv_heads](
        qkv,
        cos,
        sin,
        at,
        q,
        keys,
        values,
        qkv.stride(0),
        dim if turn is not None and len(cos) > 1 else 0,
        *keys.stride()[:3],
        *values.stride()[:3],
        heads,
        kv_heads,
        D=dim,
        BLOCK=triton.next_power_of_2(dim),
        TURN=turn is not None,
        num_warps=1,
    )
    return q


@triton.jit
def _silu_product(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    """y [R, C] = silu(x[:, :C]) * x[:, C:], a block of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(x_ptr + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * columns + column, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def silu_product(x: Tensor) -> Tensor:
    """silu(gate) * up of x = [gate, up] [..., 2 M] -> [..., M], in float32 and rounded once."""
    columns = x.shape[-1] // 2
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(columns))
    _silu_product[y.numel() // columns, triton.cdiv(columns, block)](x, y, columns, BLOCK=block, num_warps=4)
    return y
