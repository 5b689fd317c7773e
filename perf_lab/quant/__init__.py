"""Weights in fewer bytes: the formats int8 and nf4, and a Linear that stores its weight in one.

A format is an op (`int8`, `nf4`); an implementation of it is a class, made by `impl()` or
`impl(block_size=...)`, with the methods of `Format`: quantize(w) -> Quantized, dequantize(q, dtype)
-> Tensor, and for nf4 pack(codes) and unpack(packed, count).

w        any shape, float32, float16 or bfloat16, finite, any strides; empty and 0-d too. Everything
         is computed in float32. NaN or infinity is a ValueError that says where.
result   codes and float32 scales, on w's device. dequantize gives w's shape, by default in w's
         dtype; each weight is computed in float32 and rounded once to the dtype asked for (past
         that dtype's largest number it becomes inf, as in Tensor.to).
decoding takes codes and scales of any strides, and only of its own layout.

int8: symmetric, one scale for each row along the last axis (an output channel of a Linear)
  codes      int8, w's shape, in [-127, 127]
  scales     float32 [..., 1]: absmax / 127, held in [2^-126, 2^121.01]: below, a scale would be a
             denormal, which loses digits and is flushed to zero by some devices; above, 127 * scale
             would overflow (the bound is met by one number only, the largest float32)
  weight     code * scale
  rounding   w / scale to the nearest whole number, ties to even, with the scale as stored; clamped
  error      |w - weight| <= absmax * (1/254 + 2^-23) for absmax >= 2^-119, up to the largest float32;
             below that <= 2^-127: half the smallest scale. A row of zeros comes back as zeros, and
             no weight changes its sign.
  bytes      numel + 4 * rows

nf4: 16 levels, the quantiles of a normal distribution, and one scale for each block
  blocks     block_size elements in a row of the flattened w (a power of two from 16 to 4096,
             default 64); a block may span two rows of w, and the last may be shorter
  codes      uint8 [ceil(numel / 2)]: element 2i in the high four bits of byte i, 2i + 1 in the low;
             0 in the low bits after an odd number of elements
  scales     float32 [ceil(numel / block_size)]: the block's absmax, of its real elements only
  weight     NF4_LEVELS[code] * scale
  rounding   to the level nearest to w / scale. Where w / scale is, as a float32, midway between two
             levels (their float32 mean), the lower is taken; so the distance to the chosen level
             exceeds the smallest by less than 3 * 2^-24 * absmax
  error      |w - weight| <= 0.1519036 * absmax + 3 * 2^-24 * absmax: half the gap between -1 and the
             next level; plus half the smallest denormal. A block of zeros comes back as zeros.
             Quantizing what was dequantized gives the same codes and scales, bit for bit (for an
             absmax from 2^-122 on: below, the products of the lowest levels are denormals).
  bytes      ceil(numel / 2) + 4 * ceil(numel / block_size): 36 for 64 weights, 7.1x less than float32

The bounds hold where denormals are kept (CPU, CUDA); a device that flushes them adds 2^-126.

quantized_linear: y = x @ weight.T + bias, the weight dequantized to x's dtype and then multiplied
  FLOPs        2 * rows * in * out, and in * out more to dequantize
  least bytes  codes, scales, bias and x read once, y written once

Sources: nf4 from Dettmers et al., QLoRA, arXiv:2305.14314, section 3 and appendix E; int8 from
Wu et al., Integer Quantization for Deep Learning Inference, arXiv:2004.09602, section 3.
"""

from perf_lab.quant.contract import NF4_LEVELS, Format, Quantized, int8, nf4, quantize_op, quantized_linear
from perf_lab.quant.linear import QuantizedLinear
from perf_lab.quant.replace import quantize_

__all__ = [
    "NF4_LEVELS",
    "Format",
    "Quantized",
    "QuantizedLinear",
    "int8",
    "nf4",
    "quantize_",
    "quantize_op",
    "quantized_linear",
]

int8.load(__name__, "int8_torch")
nf4.load(__name__, "nf4_torch")
