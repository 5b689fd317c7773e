"""RMS normalization by torch.compile; perf_lab.compiling says how many kernels that makes, and which."""

import torch
from torch import Tensor

from perf_lab.compiling import LIMITS, OWN_KERNEL, as_rows, kernel
from perf_lab.rms_norm import cast_once, rms_norm


@rms_norm.register("compiled", devices=("cpu", "cuda"), limits=LIMITS)
@torch.no_grad()  # one state of autograd, so one kernel
def compiled_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last axis of x [..., C] with weight [C]; what is strided is copied first."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = (x.numel() // x.shape[-1], x.shape[-1])
    own = x.numel() >= OWN_KERNEL
    rows, factors = as_rows(x, *shape, static=own), as_rows(weight, shape[1], static=own)
    key = (x.device, x.dtype, weight.dtype, (*shape, eps) if own else None)
    return kernel(cast_once, own, *key)(rows, factors, eps).view(x.shape)
