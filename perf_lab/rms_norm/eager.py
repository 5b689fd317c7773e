"""RMS normalization as PyTorch ships it: the reference that others are timed against."""

import torch
import torch.nn.functional as F
from torch import Tensor

from perf_lab.rms_norm import rms_norm


@rms_norm.register(
    "eager",
    known_failures={
        "test_what_is_not_finite_stays_in_its_row[cuda]": "torch's CUDA kernel gives NaN in all of a row that"
        " holds an infinity; 1 / rms is 0 there, and so is every other element"
    },
)
def eager_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last axis of x [..., C] with weight [C], fused where both have one dtype."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(torch.float32), weight.shape, weight, eps).to(x.dtype)
