"""Wrong softmaxes. Forward tests of well-known libraries pass the first two."""

import torch
from torch import Tensor

from perf_lab.softmax import softmax
from tests.mutants import mutant


@mutant(softmax, killed_by="test_softmax::test_matches_the_oracle")
def all_zeros(x: Tensor) -> Tensor:
    """All zeros."""
    return torch.zeros_like(x)


@mutant(softmax, killed_by="test_softmax::test_matches_the_oracle")
def uniform(x: Tensor) -> Tensor:
    """The same probability everywhere."""
    return torch.full_like(x, 1 / max(1, x.shape[-1]))


@mutant(softmax, killed_by="test_softmax::test_matches_the_oracle")
def half(x: Tensor) -> Tensor:
    """Half the value."""
    return torch.softmax(x, -1) / 2


@mutant(softmax, killed_by="test_softmax::test_does_not_overflow")
def unshifted(x: Tensor) -> Tensor:
    """The maximum is not subtracted."""
    weights = x.float().exp()
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
