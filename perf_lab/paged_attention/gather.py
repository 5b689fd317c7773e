"""Paged attention in plain torch: what the tables name is copied together, then attended to as any other."""

import torch
from torch import Tensor

from perf_lab.attention import DTYPES, attention
from perf_lab.paged_attention import paged_attention


@paged_attention.register("gather", dtypes=DTYPES)
def gather_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of q [B, Hq, Tq, D] over k, v [N, S, Hkv, D] -> [B, Hq, Tq, D]. Reads lengths on the host."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    S, counts = k.shape[1], lengths.tolist()
    for n in sorted({n for n in counts if n > 0}):  # rows of one length share a call
        rows = [b for b, count in enumerate(counts) if count == n]
        own = slice(None) if len(rows) == len(counts) else rows
        named = tables[own, : -(-n // S)].flatten()
        keys, values = (
            pool.index_select(0, named)
            .view(len(rows), -(-n // S) * S, *pool.shape[2:])[:, :n]
            .transpose(1, 2)
            for pool in (k, v)  # [rows, Hkv, n, D]
        )
        out[own] = attention["sdpa"].fn(q[own], keys, values, causal=True, scale=scale, window=window)
    return out
