"""Attention as the formula reads: every score at once, O(Tq * Tk) memory; others are timed against it."""

import torch
from torch import Tensor

from perf_lab.attention import DTYPES, attention, tiles


@attention.register(
    "naive",
    dtypes=DTYPES,
    known_failures={
        "test_memory_grows_with_the_length_not_its_square": "it holds all Tq * Tk scores: that is its point"
    },
)
def naive_attention(
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

    Both products are in float32 too: a float16 q k^T overflows. On a GPU that leaves the
    half-precision matrix units idle.
    """
    wide, Tq, Tk = tiles.accumulator(q), q.shape[2], k.shape[2]
    rows, cols = torch.arange(Tq, device=q.device), torch.arange(Tk, device=q.device)
    seen = tiles.visible(rows, cols, Tq, Tk, causal=causal, window=window, lengths=lengths)
    scores = tiles.product(q.to(wide) * (scale or q.shape[3] ** -0.5), k.to(wide).mT)  # [B, Hq, Tq, Tk]
    scores = tiles.hide(scores, seen, mask)
    weights = scores.softmax(3)
    if Tk:
        weights.masked_fill_(scores.amax(3, keepdim=True) == -torch.inf, 0)  # sees no key
    return tiles.product(weights, tiles.without_slack(v, lengths).to(wide)).to(q.dtype)
