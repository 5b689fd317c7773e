"""The two calls of PyTorch that the fused op replaces: the reference that others are timed against."""

import torch
import torch.nn.functional as F
from torch import Tensor

from perf_lab.add_rms_norm import add_rms_norm


@add_rms_norm.register(
    "eager",
    known_failures={
        "test_what_is_not_finite_stays_in_its_row[cuda]": "torch's CUDA rms_norm gives NaN in all of a row"
        " that holds an infinity; 1 / rms is 0 there, and so is every other element"
    },
)
def eager_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """(RMS norm of s = x + residual [..., C] with weight [C], s); the norm fused where dtypes allow."""
    s = x + residual
    if weight.dtype == s.dtype:
        return F.rms_norm(s, weight.shape, weight, eps), s
    return F.rms_norm(s.to(torch.float32), weight.shape, weight, eps).to(s.dtype), s
