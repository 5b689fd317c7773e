"""Five faults that every tolerance must reject, planted in the reference of every op that has an oracle."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perf_lab.numerics import poisoned
from perf_lab.op import Op, load_all
from perf_lab.quant import QuantizedLinear, quantized_linear

from . import mutant

TILE = 16

# the property that holds an op's output to its oracle
ORACLE = {
    "rms_norm": "test_rms_norm::test_matches_the_oracle",
    "add_rms_norm": "test_add_rms_norm::test_matches_the_oracle",
    "softmax": "test_softmax::test_matches_the_oracle",
    "attention": "test_attention::test_every_case_matches_the_oracle",
    "paged_attention": "test_paged_attention::test_every_case_matches_the_oracle",
    "quantized_linear": "test_quant::test_linear_multiplies_by_the_decoded_weight",
    "sampling": "test_sampling::test_every_step_has_its_say_in_its_order",
}


def zeros(y: Tensor) -> Tensor:
    """All zeros."""
    return torch.zeros_like(y)


def uniform(y: Tensor) -> Tensor:
    """The mean of a row in all of its elements."""
    return y.double().mean(-1, keepdim=True).expand_as(y).to(y.dtype) if y.numel() else y


def half(y: Tensor) -> Tensor:
    """Half the value."""
    return y / 2


def dropped_tile(y: Tensor) -> Tensor:
    """The last tile of columns is not stored: zeros where 16 columns, or what is left of them, should be."""
    y = y.clone()
    if y.numel():
        y[..., (y.shape[-1] - 1) // TILE * TILE :] = 0
    return y


def last_row_unwritten(y: Tensor) -> Tensor:
    """The last row is as the allocator gave it."""
    with poisoned():
        written = torch.empty(y.shape, dtype=y.dtype)
    rows = y.shape[:-1].numel() - 1
    if y.numel():
        written.view(-1, y.shape[-1])[:rows] = y.reshape(-1, y.shape[-1])[:rows]
    return written


FAULTS = (zeros, uniform, half, dropped_tile, last_row_unwritten)


def each(y: Any, fault: Callable[[Tensor], Tensor]) -> Any:
    """The fault, in each output of an op."""
    return tuple(map(fault, y)) if isinstance(y, tuple) else fault(y)


def plant(op: Op, fault: Callable[[Tensor], Tensor]) -> None:
    """Declare the reference of `op` with this fault a mutant."""
    right = op[op.reference].fn

    class Layer(QuantizedLinear):
        def forward(self, x: Tensor) -> Tensor:
            return fault(super().forward(x))

    def call(*args: Any, **how: Any) -> Any:
        return each(right(*args, **how), fault)

    wrong: Any = Layer if op is quantized_linear else call
    wrong.__name__, wrong.__doc__ = f"reference_with_{fault.__name__}", fault.__doc__
    mutant(op, killed_by=ORACLE[op.name])(wrong)


for judged in load_all().values():
    if judged.name in ORACLE:
        for planted in FAULTS:
            plant(judged, planted)
