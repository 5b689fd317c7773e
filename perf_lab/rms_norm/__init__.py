"""RMS normalization over the last axis: y[..., j] = x_j * rsqrt(mean_k x_k^2 + eps) * weight_j.

x        [..., C], float32, float16, bfloat16 or float64, any strides and number of axes;
         the result has its shape and dtype, whatever the weight's, and rows share nothing with each other.
weight   [C], of x's dtype or float32, any stride. There is no default: what has no weight passes ones.
eps      from 2^-100 to 2^100. Squares below 2^-126 may vanish in float32: next to
         an eps of 2^-100 that is less than half a unit in the last place.
casts    one mode: x to float32, squares, mean, eps, rsqrt and both products in float32, one
         rounding to x's dtype at the end. `cast_once` is that mode in torch's words. (The mode of
         Llama's first code, which rounds before the weight, differs in a quarter of bfloat16 elements.)
         float64 stays float64.
range    the sum of squares of a row must be finite in float32: |x| <= 1.8e19 / sqrt(C).
         Above, mean is +inf and finite elements give 0.
zeros    a row of zeros gives zeros.
+-inf    gives NaN in its place and 0 in the rest of its row; NaN gives NaN in its whole row.
empty    zero rows, or rows of zero length, give an empty result.
forward  only: whether the result carries a gradient is left to the implementation.

FLOPs        4 an element (square, sum, two products) and 3 a row (mean, eps, rsqrt).
least bytes  one read and one write of x, one read of weight.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
"""

import torch
from torch import Tensor

from perf_lab.op import FLOATS, Cost, Op

SMALLEST_EPS, LARGEST_EPS = 2.0**-100, 2.0**100


def oracle(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The definition, in the float64 of its arguments."""
    if x.shape[-1] == 0:
        return x
    squares = (x * x).sum(-1, keepdim=True) / x.shape[-1]  # [..., 1]
    return x / (squares + eps).sqrt() * weight


def cast_once(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The op in plain torch, rounded where the contract says."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [..., 1]
    return (wide * rstd * weight).to(x.dtype)


def validate(x: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Raise TypeError or ValueError for what the contract refuses."""
    for name, value in (("x", x), ("weight", weight)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, accepted is a Tensor")
    if x.ndim == 0:
        raise ValueError("x: got a scalar, accepted are shapes [..., C]")
    if x.dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"x: got {x.dtype}, accepted are {(*FLOATS, torch.float64)}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, accepted is [C] = {tuple(x.shape[-1:])}")
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"weight: got {weight.dtype}, accepted are x's {x.dtype} and {torch.float32}")
    if weight.device != x.device:
        raise ValueError(f"weight: got device {weight.device}, accepted is x's {x.device}")
    if not isinstance(eps, float):
        raise TypeError(f"eps: got {type(eps).__name__}, accepted is a float")
    if not SMALLEST_EPS <= eps <= LARGEST_EPS:
        raise ValueError(f"eps: got {eps}, accepted are {SMALLEST_EPS:.3g} to {LARGEST_EPS:.3g}")


def cost(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Cost:
    """4 FLOPs an element and 3 a row; x read and written once, weight read once."""
    rows = x.numel() // max(1, x.shape[-1])
    moved = 2 * x.numel() * x.element_size() + weight.numel() * weight.element_size()
    return Cost(flops=4 * x.numel() + 3 * rows, bytes=moved)


rms_norm = Op(
    "rms_norm",
    oracle=oracle,
    baseline=cast_once,
    magnitude=lambda x, weight, eps=1e-6: oracle(x, weight, eps).abs(),
    reduction=lambda x, weight, eps=1e-6: x.shape[-1],
    validate=validate,
    cost=cost,
    reference="eager",
)
rms_norm.load(__name__, "eager", "compiled", "triton", "liger")
