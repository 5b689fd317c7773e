"""What an implementation in plain torch needs for one tile of queries and keys."""

import math

import torch
from torch import Tensor


def accumulator(q: Tensor) -> torch.dtype:
    """The dtype of scores and sums: float64 for float64, else float32."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def product(x: Tensor, y: Tensor) -> Tensor:
    """The product of x [B, Hq, m, K] and y [B, Hkv, K, n], each head of y with its group of x's.

    Gives [B, Hq, m, n]. A group's rows lie below each other, so y is neither repeated nor copied.
    """
    B, Hq, m, K = x.shape
    Hkv, n = y.shape[1], y.shape[3]
    rows = x.reshape(B, Hkv, Hq // max(1, Hkv) * m, K)
    return (rows @ y).view(B, Hq, m, n)


def visible(
    rows: Tensor,
    cols: Tensor,
    q_len: int,
    kv_len: int,
    *,
    causal: bool,
    window: int | None,
    lengths: Tensor | None,
) -> Tensor | None:
    """Which keys `cols` [n] the queries `rows` [m] see: bool, broadcastable to [B, 1, m, n]; None: all."""
    valid = kv_len if lengths is None else lengths.to(rows.device)[:, None, None, None]  # [B, 1, 1, 1]
    if not causal:
        return None if lengths is None else cols < valid
    position = rows[:, None] + (valid - q_len)  # of each query among the keys: below `valid`
    seen = cols <= position
    return seen if window is None else seen & (cols > position - window)


def hide(scores: Tensor, seen: Tensor | None, mask: Tensor | None) -> Tensor:
    """Apply the mask to scores [B, Hq, m, n], in place; -inf where a key is not seen, and that last:
    a key that does not exist may have a score and a mask of NaN.
    """
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else scores.add_(mask)
    return scores if seen is None else scores.masked_fill_(~seen, -math.inf)


def without_slack(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The keys or values x [B, Hkv, Tk, D], 0 from lengths[b] on: a weight of 0 does not hide a NaN."""
    if lengths is None:
        return x
    slack = torch.arange(x.shape[2], device=x.device) >= lengths.to(x.device)[:, None]  # [B, Tk]
    return x.masked_fill(slack[:, None, :, None], 0)
