"""Attention by torch's fused kernels, `scaled_dot_product_attention`, brought under the contract.

Its own causal alignment is top-left, it knows no window and no lengths, and a NaN in a key that a mask
hides reaches its output. So: what no query sees is cut off, as views; a mask is built only for
what is left. Plain causal prefill (Tq = Tk) and one-token decoding need none.

Sources: Dao, FlashAttention-2, arXiv:2307.08691; Rabe and Staats, arXiv:2112.05682.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perf_lab.attention import DTYPES, attention
from perf_lab.attention.layout import ALIGNMENT, GRID, laid_out

LOWEST = (
    "torch's memory-efficient CUDA kernel multiplies the mask by log2(e): the lowest number becomes -inf,"
    " and a row of it alone gives zeros where softmax gives the mean of v"
)


@attention.register(
    "sdpa",
    dtypes=DTYPES,
    known_failures={
        "test_a_row_of_the_lowest_number_is_softmax_and_not_nothing[cuda-float32]": LOWEST,
        "test_a_row_of_the_lowest_number_is_softmax_and_not_nothing[cuda-bfloat16]": LOWEST,
        "test_memory_grows_with_the_length_not_its_square[cuda]": "no fused CUDA kernel takes grouped heads"
        " in float32: torch holds all Tq * Tk scores",
        "test_a_captured_call_follows_the_lengths[cuda]": "it reads lengths on the host: no capture",
    },
)
def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Attention of q [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] -> [B, Hq, Tq, Dv].

    `lengths` are read by the host (on a GPU it waits for them), and rows of different lengths
    run one by one, each without its slack. Where Dv != D torch falls back on O(Tq * Tk) memory.
    """
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)].expand(-1, -1, q.shape[2], k.shape[2])
    if lengths is not None:
        return _ragged(q, k, v, mask, lengths.tolist(), causal=causal, scale=scale, window=window)
    return _attend(q, k, v, mask, causal=causal, scale=scale, window=window)


def _ragged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lengths: list[int], **how: Any) -> Tensor:
    """Each row alone with its valid keys; all at once where they have the same number of them."""
    if len(set(lengths)) > 1:
        masks = [mask] * len(lengths) if mask is None or mask.shape[0] == 1 else mask.split(1)
        rows = zip(q.split(1), k.split(1), v.split(1), masks, lengths, strict=True)
        return torch.cat([_ragged(a, b, c, m, [n], **how) for a, b, c, m, n in rows])
    n = lengths[0] if lengths else 0
    return _attend(q, k[:, :, :n], v[:, :, :n], None if mask is None else mask[..., :n], **how)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Without lengths; mask [1 or B, 1 or Hq, Tq, Tk]. Cuts off what no query sees, then runs the kernel."""
    (B, Hq, q_len, D), (Hkv, kv_len), Dv = q.shape, k.shape[1:3], v.shape[3]
    if not (q.numel() and k.numel() and v.numel()):
        return q.new_zeros(B, Hq, q_len, Dv)
    blind = q_len - kv_len
    if causal and blind > 0:
        mask = None if mask is None else mask[:, :, blind:]
        seeing = _attend(q[:, :, blind:], k, v, mask, causal=True, scale=scale, window=window)
        return F.pad(seeing, (0, 0, blind, 0))
    if window is not None and (passed := kv_len - q_len + 1 - window) > 0:  # keys that left every window
        k, v, mask = k[:, :, passed:], v[:, :, passed:], None if mask is None else mask[..., passed:]
    if q_len > 1:
        square = causal and mask is None and blind == 0 and (window is None or window >= kv_len)
        bias = _bias(q, k, causal, window, mask) if causal and not square else mask
        return _fused(q, k, v, bias, square, scale)
    if Hq == Hkv:
        return _fused(q, k, v, mask, False, scale)
    # one query sees every key that is left: its group of heads can be the kernel's queries
    group = (Hkv, Hq // Hkv)
    mask = mask if mask is None or mask.shape[1] == 1 else mask.view(-1, *group, k.shape[2])
    return _fused(q.view(B, *group, D), k, v, mask, False, scale).reshape(B, Hq, 1, Dv)


def _bias(q: Tensor, k: Tensor, causal: bool, window: int | None, mask: Tensor | None) -> Tensor:
    """The mask without what causal and window hide: of its dtype, or bool [Tq, Tk]."""
    q_len, kv_len = q.shape[2], k.shape[2]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril_(kv_len - q_len)
    if window is not None:
        seen.triu_(kv_len - q_len - window + 1)
    if mask is None:
        return seen
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -torch.inf)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """One kernel call; a row whose bias hides every key is zeros."""
    for axis in (0, 1):
        if q.shape[axis] > GRID:
            (q0, q1), (k0, k1), (v0, v1) = (_halve(x, axis, k.shape[axis]) for x in (q, k, v))
            bias0, bias1 = (None, None) if bias is None else _halve(bias, axis, k.shape[axis])
            first = _fused(q0, k0, v0, bias0, is_causal, scale)
            return torch.cat([first, _fused(q1, k1, v1, bias1, is_causal, scale)], axis)
    grouped = q.shape[1] != k.shape[1]
    if grouped and bias is not None and q.is_cuda:  # no CUDA kernel that takes a mask takes grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        grouped = False
    q, k, v = (laid_out(x) for x in (q, k, v))
    if bias is not None and bias.is_cuda and not (bias.is_contiguous() and bias.data_ptr() % ALIGNMENT == 0):
        bias = bias.clone(memory_format=torch.contiguous_format)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    if bias is None or bias.ndim < 4:  # causal alone leaves each query a key
        return out
    shown = bias if bias.dtype is torch.bool else bias > -torch.inf
    return out.masked_fill(~shown.any(3, keepdim=True), 0)


def _halve(x: Tensor, axis: int, kv_size: int) -> tuple[Tensor, ...]:
    """Cut at half of the KV heads (or rows), so that a group stays together; what is broadcast is shared."""
    if x.ndim < 4 or x.shape[axis] == 1:
        return x, x
    size = kv_size if kv_size > 1 else x.shape[axis]
    return x.tensor_split([x.shape[axis] // size * (size // 2)], axis)
