"""Softmax as PyTorch ships it: the reference that others are timed against."""

import torch
from torch import Tensor

from perf_lab.softmax import softmax


@softmax.register("eager")
def eager_softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis of x [..., C]."""
    return torch.softmax(x, -1)
