"""RMS normalization of Liger-Kernel, where that package is installed: a peer to be timed against.

Written against its source (ops/rms_norm.py); it has not run in this project yet, so nothing is
known of which properties it fails.
"""

import torch
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from torch import Tensor

from perf_lab.op import Limit
from perf_lab.rms_norm import rms_norm

LIMITS = (
    Limit("sums are float32, too coarse for float64", lambda x, *_, **__: x.dtype is torch.float64),
    Limit("a row must fit one block of at most 65,536", lambda x, *_, **__: x.shape[-1] > 65536),
)


@rms_norm.register("liger", devices=("cuda",), limits=LIMITS)
@torch.no_grad()
def liger_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last axis of x [..., C] with weight [C], in Liger's "gemma" mode without an
    offset: float32 throughout and one rounding, as the contract asks.
    """
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return LigerRMSNormFunction.apply(x, weight.contiguous(), eps, 0.0, "gemma", False)
