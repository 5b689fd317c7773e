"""Attention one tile of queries and keys at a time, with a running (online) softmax.

For each query: the highest score so far m, the sum l of exp(score - m), and the output so far,
also in units of exp(-m). A tile with a higher score rescales both by exp(m - m_new).

Sources: Rabe and Staats, Self-attention does not need O(n^2) memory, arXiv:2112.05682;
Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
"""

import torch
from torch import Tensor

from perf_lab.attention import DTYPES, attention, tiles

CHUNK = 512


@attention.register("chunked", dtypes=DTYPES)
def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Attention of q [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] -> [B, Hq, Tq, Dv].

    `chunk` queries meet `chunk` keys at a time, so that scores take B Hq chunk^2 elements
    whatever the lengths. Raises ValueError for a chunk below 1.
    """
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk: got {chunk!r}, accepted are whole numbers from 1")
    B, Hq, Tq, D = q.shape
    Tk, wide = k.shape[2], tiles.accumulator(q)
    mask = None if mask is None else mask.expand(B, Hq, Tq, Tk)
    q, k = q.to(wide) * (scale or D**-0.5), k.to(wide)
    v, out = tiles.without_slack(v, lengths).to(wide), v.new_empty(B, Hq, Tq, v.shape[3])
    positions = torch.arange(max(Tq, Tk), device=q.device)
    for start in range(0, Tq, chunk):
        rows = slice(start, min(start + chunk, Tq))
        top = q.new_full((B, Hq, rows.stop - start, 1), -torch.inf)
        total, summed = torch.zeros_like(top), q.new_zeros(B, Hq, rows.stop - start, v.shape[3])
        first, last = _reach(rows, Tk - Tq, Tk, causal, None if lengths is not None else window)
        for cols in (slice(j, min(j + chunk, last)) for j in range(first, last, chunk)):
            seen = tiles.visible(
                positions[rows], positions[cols], Tq, Tk, causal=causal, window=window, lengths=lengths
            )
            scores = tiles.product(q[:, :, rows], k[:, :, cols].mT)  # [B, Hq, m, n]
            scores = tiles.hide(scores, seen, None if mask is None else mask[:, :, rows, cols])
            higher = torch.maximum(top, scores.amax(3, keepdim=True))
            base = higher.masked_fill(higher == -torch.inf, 0)  # -inf minus -inf would be NaN
            weights, decay = scores.sub_(base).exp_(), (top - base).exp_()
            total = total * decay + weights.sum(3, keepdim=True)
            summed = summed * decay + tiles.product(weights, v[:, :, cols])
            top = higher
        # the highest score alone adds exp(0) = 1: a total below 1 is the 0 of a query that sees no key
        out[:, :, rows] = summed / total.clamp(min=1)
    return out


def _reach(rows: slice, shift: int, kv_len: int, causal: bool, window: int | None) -> tuple[int, int]:
    """The range of keys beyond which none of the queries `rows` sees any; query i is key i + shift."""
    if not causal:
        return 0, kv_len
    first = 0 if window is None else max(0, rows.start + shift - window + 1)
    return first, min(kv_len, rows.stop + shift)
