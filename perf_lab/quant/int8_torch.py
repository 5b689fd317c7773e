"""INT8 in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perf_lab.quant.contract import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    Quantized,
    at_once,
    check_stored,
    check_weight,
    int8,
)


@int8.register("torch")
@dataclass(frozen=True)
class TorchInt8:
    """The int8 of `perf_lab.quant`: w [..., C] as int8 codes [..., C] and float32 scales [..., 1]."""

    layout = "int8"

    def quantize(self, w: Tensor) -> Quantized:
        """Store w; TypeError or ValueError for what is no finite float weight."""
        check_weight(w)
        rows = w.detach().float().contiguous()  # [..., C]
        largest = _absmax(rows)
        steps = torch.full_like(largest, 127)  # a tensor: CUDA divides by a number through its reciprocal
        scales = (largest / steps).clamp(SMALLEST_SCALE, LARGEST_SCALE)  # [..., 1]
        codes = (rows / scales).round_().clamp_(-127, 127).to(torch.int8)
        return Quantized(codes, scales, self.layout, tuple(w.shape), w.dtype)

    def dequantize(self, q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
        """The weight, in `dtype` or its own; ValueError for another layout, TypeError for no float dtype."""
        dtype = dtype or q.dtype
        check_stored(q, self.layout, dtype)
        codes, scales = (torch.atleast_2d(t).flatten(0, -2) for t in (q.codes, q.scales))  # [R, C], [R, 1]
        w = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        rows = max(1, at_once(codes.numel(), codes.device) // max(1, codes.shape[1]))
        for part, *factors in zip(*(t.split(rows) for t in (w, codes, scales)), strict=True):
            torch.mul(*factors, out=part)  # in float32, rounded to dtype
        return w.view(q.shape)


def _absmax(rows: Tensor) -> Tensor:
    """The largest magnitude of each row [..., 1]; 0 for a row without elements."""
    if rows.numel():
        return rows.abs().amax(-1, keepdim=True)
    return rows.new_zeros((*rows.shape[:-1], 1))
