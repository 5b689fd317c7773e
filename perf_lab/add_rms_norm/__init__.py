"""Residual addition and RMS normalization in one: s = x + residual, y = rms_norm(s) over the last axis.

    s_j = x_j + residual_j        y_j = s_j * rsqrt(mean_k s_k^2 + eps) * weight_j

Between the layers of a decoder the two always come together: s goes on as the
residual stream, y into the next layer. Apart they move five tensors and a half
through memory (x, residual, s; s, y), together four.

x         [..., C], float32, float16, bfloat16 or float64, any strides and number of axes;
          both results have its shape and dtype.
residual  the shape and dtype of x, any strides.
weight    [C], of x's dtype or float32, any stride. What has no weight passes ones.
eps       from 2^-100 to 2^100.
result    (y, s), both new tensors; no input is changed.
casts     s is the sum rounded once to x's dtype, as x + residual gives it, and y is the norm of that
          rounded s: what two calls give, not what one sum in float32 would. Within the norm all is
          float32 and rounded once at the end, as perf_lab.rms_norm says. float64 stays float64.
range     the sum of squares of a row of s must be finite in float32: |s| <= 1.8e19 / sqrt(C).
zeros     a row where x = -residual gives zeros twice.
+-inf     in s gives NaN in its place of y and 0 in the rest of that row; NaN gives NaN in the whole row
          of y. In s both stay in their place.
empty     zero rows, or rows of zero length, give empty results.
forward   only: whether the results carry a gradient is left to the implementation.

FLOPs        5 an element (sum, square, sum, two products) and 3 a row (mean, eps, rsqrt).
least bytes  one read of x, residual and weight, one write of y and s.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; the fused form
is that of the pre-norm decoder layer, as inference engines run it.
"""

from torch import Tensor

from perf_lab import rms_norm as norm
from perf_lab.op import Cost, Op


def oracle(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The definition, in the float64 of its arguments; s is not rounded, which moves y by half an ulp."""
    s = x + residual
    if s.shape[-1] == 0:
        return s, s
    squares = (s * s).sum(-1, keepdim=True) / s.shape[-1]  # [..., 1]
    return s / (squares + eps).sqrt() * weight, s


def add_then_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The op in plain torch, rounded where the contract says."""
    s = x + residual
    return norm.cast_once(s, weight, eps), s


def magnitude(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """|y| and |s|: the sum of two numbers is rounded once, however much of it cancels."""
    y, s = oracle(x, residual, weight, eps)
    return y.abs(), s.abs()


def validate(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Raise TypeError or ValueError for what the contract refuses."""
    norm.validate(x, weight, eps)
    if not isinstance(residual, Tensor):
        raise TypeError(f"residual: got {type(residual).__name__}, accepted is a Tensor")
    if residual.shape != x.shape:
        raise ValueError(f"residual: got shape {tuple(residual.shape)}, accepted is x's {tuple(x.shape)}")
    if residual.dtype != x.dtype:
        raise TypeError(f"residual: got {residual.dtype}, accepted is x's {x.dtype}")
    if residual.device != x.device:
        raise ValueError(f"residual: got device {residual.device}, accepted is x's {x.device}")


def cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Cost:
    """5 FLOPs an element and 3 a row; x, residual and weight read once, y and s written once."""
    rows = x.numel() // max(1, x.shape[-1])
    moved = 4 * x.numel() * x.element_size() + weight.numel() * weight.element_size()
    return Cost(flops=5 * x.numel() + 3 * rows, bytes=moved)


add_rms_norm = Op(
    "add_rms_norm",
    oracle=oracle,
    baseline=add_then_norm,
    magnitude=magnitude,
    reduction=lambda x, residual, weight, eps=1e-6: x.shape[-1],
    validate=validate,
    cost=cost,
    reference="eager",
)
add_rms_norm.load(__name__, "eager", "compiled", "triton")
