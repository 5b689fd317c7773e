"""The decode step on the CPU, with few calls: at one token a small model waits for them, not for arithmetic.

SmolLM2's matrix products take 24 to 26 ms a token on one core of an EPYC. With the layers' own forward it
takes 6.6 ms more, for modules, checks and views in caches that the weights have swept; with this step 5. The
slot is a number here, keys and values go there unchecked, and one attention kernel reads what is held.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perf_lab.decode import Slots
from perf_lab.model.step import decode_step
from perf_lab.op import FLOATS


@decode_step.register("host", devices=("cpu",), dtypes=(*FLOATS, torch.float64))
def host(model: Any, tokens: Tensor, slots: Any, positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """With the slot read by the host, and each operation called directly."""
    at = int(slots.at)
    x = model.embedding(tokens[:, 0])  # [B, W]
    if model.position is not None:
        x = x + model.position.weight[positions.flatten()]
    turn = None if model.rotary is None else [table.flatten(0, -3) for table in model.rotary(positions)]
    for layer in model.layers:
        x = x + _attention(layer.attention, _norm(x, layer.attention_norm), turn, slots, at, mask)
        x = x + layer.mlp(_norm(x, layer.mlp_norm))
    return model.head(_norm(x, model.norm)).unsqueeze(1)


def _norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return torch.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)


def _attention(
    layer: Any, x: Tensor, turn: list[Tensor] | None, slots: Any, at: int, mask: Tensor | None
) -> Tensor:
    """Store the keys and values of x [B, W] in slot `at`, and attend: [B, W]. turn: two [1 or B, 1, D]."""
    h, h_kv, d = layer.heads, layer.kv_heads, layer.head_dim
    qkv = layer.qkv(x).view(len(x), h + 2 * h_kv, d)
    qk = qkv[:, : h + h_kv]  # [B, H + Hkv, D]
    if turn is not None:
        qk = torch.addcmul(qk * turn[0], qk.roll(d // 2, -1), turn[1])
    keys, values = slots.memory(layer.index)  # [B, Hkv, capacity, D]
    keys.select(2, at).copy_(qk[:, h:])
    values.select(2, at).copy_(qkv[:, h + h_kv :])
    q = qk[:, :h]
    if mask is not None or type(slots) is not Slots:  # others have ways of their own to look
        seen = slots.look(layer.index, q.unsqueeze(2), window=layer.window, mask=mask)
    else:  # a group of heads are the queries of one key head
        held = slice(0 if layer.window is None else max(0, at + 1 - layer.window), at + 1)
        seen = F.scaled_dot_product_attention(
            q.reshape(len(x), h_kv, h // h_kv, d), keys[:, :, held], values[:, :, held]
        )
    return layer.out(seen.reshape(len(x), h * d))
