"""Softmax by torch.compile; perf_lab.compiling says how many kernels that makes, and which."""

import torch
from torch import Tensor

from perf_lab.compiling import LIMITS, OWN_KERNEL, as_rows, kernel
from perf_lab.softmax import softmax


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)  # [R, C]


@softmax.register("compiled", devices=("cpu", "cuda"), limits=LIMITS)
@torch.no_grad()  # one state of autograd, so one kernel
def compiled_softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis of x [..., C]; strided rows are copied first."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = (x.numel() // x.shape[-1], x.shape[-1])
    own = x.numel() >= OWN_KERNEL
    rows = as_rows(x, *shape, static=own)
    return kernel(_softmax, own, x.device, x.dtype, shape if own else None)(rows).view(x.shape)
