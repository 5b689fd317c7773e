"""What the formats and their users agree on: the stored form, the checks, the oracles, the ops.

The contract in words is the docstring of `perf_lab.quant`.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from perf_lab.op import FLOATS, Cost, Op

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32
# The largest float32 (24 bits, so a multiple of 2^98 here) whose product with 127 is still finite.
LARGEST_SCALE = float((2**128 - 2**104) // (127 * 2**98) * 2**98)

# Weights decoded in one go on the CPU: their megabyte of float32 stays in the cache, while fresh memory
# for a large weight takes the system 10 times as long to hand out as decoding it takes.
CHUNK = 2**18

BLOCK_SIZES = tuple(2**k for k in range(4, 13))  # 16 .. 4096

# QLoRA, appendix E: quantiles of the normal distribution, eight steps up and seven down from 0.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class Quantized:
    """A weight as it is stored.

    codes and scales are laid out as `layout` says ("int8", "nf4/64": the format and its block
    size); shape and dtype are those of the weight that was quantized.
    """

    codes: Tensor
    scales: Tensor
    layout: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of memory that codes and scales occupy, the whole of their storages."""
        return sum(t.untyped_storage().nbytes() for t in (self.codes, self.scales))

    def to(self, device: str | torch.device) -> "Quantized":
        """The same with its tensors on `device`."""
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))


@runtime_checkable
class Format(Protocol):
    """What an implementation of int8 or nf4 makes; `layout` names how its codes are stored."""

    @property
    def layout(self) -> str:
        """The format, for nf4 with its block size: "int8", "nf4/64"."""

    def quantize(self, w: Tensor) -> Quantized:
        """Store w; TypeError or ValueError for what is no finite float weight."""

    def dequantize(self, q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
        """The weight again; ValueError for another layout, TypeError for a dtype that is no float."""


def check_weight(w: Tensor) -> None:
    """Raise TypeError unless w is a float32, float16 or bfloat16 tensor, ValueError unless it is finite.

    A meta tensor has no values to look at.
    """
    if not isinstance(w, Tensor):
        raise TypeError(f"w: got {type(w).__name__}, accepted is a Tensor")
    if w.dtype not in FLOATS:
        raise TypeError(f"w: got {w.dtype}, accepted are {FLOATS}")
    if w.is_meta or w.isfinite().all():
        return
    where = tuple((~w.isfinite()).nonzero()[0].tolist())
    raise ValueError(f"w: got {w[where].item()} at {list(where)}, accepted are finite weights")


def check_stored(q: Quantized, layout: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless q is stored as `layout` says, TypeError unless `dtype` is a float dtype."""
    if q.layout != layout:
        raise ValueError(f"q: got the layout {q.layout!r}, accepted is {layout!r}")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype: got {dtype}, accepted are float dtypes")


def at_once(count: int, device: torch.device) -> int:
    """How many of `count` weights to decode in one go, a multiple of CHUNK: elsewhere than on the CPU all,
    in as few kernels as can be.
    """
    return CHUNK if device.type == "cpu" else CHUNK * max(1, -(-count // CHUNK))


def check_block_size(block_size: int = 64) -> None:
    """Raise ValueError unless block_size is a power of two from 16 to 4096."""
    if type(block_size) is not int or block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size: got {block_size!r}, accepted are {BLOCK_SIZES}")


def int8_oracle(q: Quantized) -> Tensor:
    """The weight that q means, in float64 on the CPU."""
    return q.codes.cpu().double() * q.scales.cpu().double()


def nf4_oracle(q: Quantized) -> Tensor:
    """The weight that q means, in float64 on the CPU."""
    packed = q.codes.cpu().long()
    codes = torch.stack([packed // 16, packed % 16], 1).flatten()  # [2 * bytes]
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float64)[codes]
    scales = q.scales.cpu().double().repeat_interleave(int(q.layout.split("/")[1]))
    count = torch.Size(q.shape).numel()
    return (levels[:count] * scales[:count]).view(q.shape)


def linear_oracle(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of x [..., in] with the decoded weight [out, in], plus bias, in the float64 of x."""
    y = torch.einsum("...i,oi->...o", x, weight.to(x))
    return y if bias is None else y + bias.to(x)


def linear_baseline(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in x's dtype."""
    return F.linear(x, weight.to(x), None if bias is None else bias.to(x))


def linear_magnitude(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The size of what is summed up to each output."""
    return linear_oracle(x.abs(), weight.abs(), None if bias is None else bias.abs())


def linear_cost(x: Tensor, q: Quantized, bias: Tensor | None = None) -> Cost:
    """The product's FLOPs and one multiplication a weight; the stored bytes, x and y once."""
    out, inner = q.shape
    rows = x.numel() // max(1, inner)
    moved = (x.numel() + rows * out) * x.element_size() + q.nbytes
    moved += 0 if bias is None else bias.nbytes
    return Cost(flops=(2 * rows + 1) * out * inner, bytes=moved)


int8 = Op("int8", oracle=int8_oracle, reference="torch")
nf4 = Op("nf4", oracle=nf4_oracle, validate=check_block_size, reference="torch")

# Implementations are modules with from_linear(linear, format); the oracle takes the decoded weight.
quantized_linear = Op(
    "quantized_linear",
    oracle=linear_oracle,
    baseline=linear_baseline,
    magnitude=linear_magnitude,
    reduction=lambda x, weight, bias=None: x.shape[-1] + (bias is not None),
    cost=linear_cost,
    reference="torch",
)

# Implementations are functions (module, format, skip, block_size) that replace its Linear layers.
quantize_op = Op("quantize_", reference="torch")
