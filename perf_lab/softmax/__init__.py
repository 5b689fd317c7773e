"""Softmax over the last axis: softmax(x)[..., j] = exp(x_j - m) / sum_k exp(x_k - m), m = max_k x_k.

x        [..., C], float32, float16, bfloat16 or float64, any strides and number of axes;
         the result has its shape and dtype, and rows share nothing with each other.
-inf     gives probability 0; a row of -inf alone has no answer and gives NaN, as torch.softmax does.
+inf     gives NaN in its whole row, and so does NaN, as in torch.softmax.
empty    zero rows, or rows of zero length, give an empty result.
sums     are accumulated in float32 whatever the dtype, in float64 for float64.
forward  only: whether the result carries a gradient is left to the implementation.

FLOPs        5 an element: maximum, subtraction, exponential, sum, division.
least bytes  one read and one write of x.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
"""

import torch
from torch import Tensor

from perf_lab.op import FLOATS, Cost, Op


def oracle(x: Tensor) -> Tensor:
    """The definition, in the float64 of its argument."""
    if x.shape[-1] == 0:
        return x
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def validate(x: Tensor) -> None:
    """Raise TypeError or ValueError for what the contract refuses."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, accepted is a Tensor")
    if x.ndim == 0:
        raise ValueError("x: got a scalar, accepted are shapes [..., C]")
    if x.dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"x: got {x.dtype}, accepted are {(*FLOATS, torch.float64)}")


def cost(x: Tensor) -> Cost:
    """5 FLOPs an element, one read and one write of it."""
    return Cost(flops=5 * x.numel(), bytes=2 * x.numel() * x.element_size())


softmax = Op(
    "softmax",
    oracle=oracle,
    baseline=lambda x: torch.softmax(x, -1),
    magnitude=oracle,
    reduction=lambda x: x.shape[-1],
    validate=validate,
    cost=cost,
    reference="eager",
)
softmax.load(__name__, "eager", "compiled", "triton", "liger")
