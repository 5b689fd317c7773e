"""The two calls by torch.compile; perf_lab.compiling says how many kernels that makes, and which."""

import torch
from torch import Tensor

from perf_lab.add_rms_norm import add_rms_norm, add_then_norm
from perf_lab.compiling import LIMITS, OWN_KERNEL, as_rows, kernel


@add_rms_norm.register("compiled", devices=("cpu", "cuda"), limits=LIMITS)
@torch.no_grad()  # one state of autograd, so one kernel
def compiled_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """(RMS norm of s = x + residual [..., C] with weight [C], s); what is strided is copied first."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(
            x.shape, dtype=x.dtype, device=x.device
        )
    shape = (x.numel() // x.shape[-1], x.shape[-1])
    own = x.numel() >= OWN_KERNEL
    inputs = (as_rows(x, *shape, static=own), as_rows(residual, *shape, static=own))
    factors = as_rows(weight, shape[1], static=own)
    key = (x.device, x.dtype, weight.dtype, (*shape, eps) if own else None)
    y, s = kernel(add_then_norm, own, *key)(*inputs, factors, eps)
    return y.view(x.shape), s.view(x.shape)
