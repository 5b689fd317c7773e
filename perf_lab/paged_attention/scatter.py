"""Writing into blocks in plain torch: one indexed assignment each for keys and values."""

import torch
from torch import Tensor

from perf_lab.attention import DTYPES
from perf_lab.paged_attention import paged_write


@paged_write.register("torch", dtypes=DTYPES)
def scatter(k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, tables: Tensor, starts: Tensor) -> None:
    """Put new_k, new_v [B, Hkv, T, D] into k, v [N, S, Hkv, D]. Waits for the device to look for what is
    left out.
    """
    T, S = new_k.shape[2], k.shape[1]
    position = starts[:, None].long() + torch.arange(T, device=starts.device)  # [B, T]
    inside = position >= 0
    block = tables.long().gather(1, (position.clamp(min=0) // S)) if position.numel() else position
    block, place = block[inside], (position % S)[inside]
    k[block, place] = new_k.transpose(1, 2)[inside]  # [tokens, Hkv, D]
    v[block, place] = new_v.transpose(1, 2)[inside]
