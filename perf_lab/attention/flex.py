"""Peer: torch's flex_attention, compiled.

torch.compile makes a kernel for each shape, which takes it seconds, so this takes one length and head dim,
and no test draws those: its results are checked where it is timed, before and after.

Source: Dong et al., Flex Attention, arXiv:2412.05496.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perf_lab.attention import attention
from perf_lab.op import Limit

TOKENS, HEAD_DIM = 8192, 128

LIMITS = (
    Limit("no mask tensor here", lambda *_, mask=None, **__: mask is not None),
    Limit("no lengths by row here", lambda *_, lengths=None, **__: lengths is not None),
    Limit("no window here", lambda *_, window=None, **__: window is not None),
    Limit(
        f"compiled for each shape, which takes seconds: {TOKENS} tokens of head dim {HEAD_DIM} only",
        lambda q, k, v, **_: {*q.shape[2:], *k.shape[2:], *v.shape[2:]} != {TOKENS, HEAD_DIM},
    ),
)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=8)
def _causal(T: int, device: torch.device) -> Any:
    """The blocks of a causal mask over T queries and keys."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=str(device))


@attention.register("flex", devices=("cuda",), limits=LIMITS)
def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: None = None,
    mask: None = None,
    lengths: None = None,
) -> Tensor:
    """Attention [B, Hq, T, D] of q [B, Hq, T, D], k and v [B, Hkv, T, D]."""
    blocks = _causal(q.shape[2], q.device) if causal else None
    grouped = q.shape[1] != k.shape[1]
    return _compiled()(q, k, v, block_mask=blocks, scale=scale, enable_gqa=grouped)
