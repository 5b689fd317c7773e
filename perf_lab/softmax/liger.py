"""Softmax of Liger-Kernel, where that package is installed: a peer to be timed against.

Written against its source (ops/softmax.py); it has not run in this project yet, so nothing is
known of which properties it fails.
"""

import torch
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from torch import Tensor

from perf_lab.op import Limit
from perf_lab.softmax import softmax

NO_FLOAT64 = Limit("exponentials are float32, too coarse for float64", lambda x: x.dtype is torch.float64)


@softmax.register("liger", devices=("cuda",), limits=(NO_FLOAT64,))
@torch.no_grad()
def liger_softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis of x [..., C]; what is strided is copied first."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return LigerSoftmaxFunction.apply(x)
