"""NF4 in plain torch: a search among the midpoints one way, a table of byte values the other."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from perf_lab.quant.contract import (
    NF4_LEVELS,
    Quantized,
    at_once,
    check_block_size,
    check_stored,
    check_weight,
    nf4,
)


@nf4.register("torch")
@dataclass(frozen=True)
class TorchNF4:
    """The nf4 of `perf_lab.quant`: w of N elements as uint8 codes [ceil(N / 2)] and float32 scales
    [ceil(N / block_size)]. Raises ValueError unless block_size is a power of two from 16 to 4096.
    """

    block_size: int = 64

    def __post_init__(self) -> None:
        check_block_size(self.block_size)

    @property
    def layout(self) -> str:
        """The format with its block size: "nf4/64"."""
        return f"nf4/{self.block_size}"

    def quantize(self, w: Tensor) -> Quantized:
        """Store w; TypeError or ValueError for what is no finite float weight."""
        check_weight(w)
        flat = w.detach().reshape(-1).float()  # [N]
        padding = -flat.numel() % self.block_size  # zeros, which raise no absmax
        blocks = F.pad(flat, (0, padding)).view(-1, self.block_size)  # [blocks, block_size]
        scales = blocks.abs().amax(1)
        unit = blocks / torch.where(scales > 0, scales, 1)[:, None]  # in [-1, 1]
        codes = torch.bucketize(unit, _midpoints(w.device), out_int32=True).to(torch.uint8)
        packed = _pack(codes.view(-1)[: flat.numel()])
        return Quantized(packed, scales, self.layout, tuple(w.shape), w.dtype)

    def dequantize(self, q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
        """The weight, in `dtype` or its own; ValueError for another layout, TypeError for no float dtype."""
        dtype = dtype or q.dtype
        check_stored(q, self.layout, dtype)
        count = torch.Size(q.shape).numel()
        w = torch.empty(count, dtype=dtype, device=q.codes.device)
        some = at_once(count, w.device)  # even, and whole blocks
        parts = w.split(some), q.codes.split(some // 2), q.scales.split(some // self.block_size)
        for part, codes, scales in zip(*parts, strict=True):
            self._decode(codes, scales, part)
        return w.view(q.shape)

    def _decode(self, codes: Tensor, scales: Tensor, w: Tensor) -> None:
        """Write the weights of some blocks into w [n]; the last block may be shorter."""
        pairs = _pairs(codes.device).index_select(0, codes.int())  # [bytes] of int64
        unit = pairs.view(torch.float32)[: len(w)]  # [n], in [-1, 1]
        size, whole = self.block_size, len(w) // self.block_size
        head, tail = slice(whole * size), slice(whole * size, None)
        torch.mul(unit[head].view(-1, size), scales[:whole, None], out=w[head].view(-1, size))
        torch.mul(unit[tail], scales[whole:], out=w[tail])

    def pack(self, codes: Tensor) -> Tensor:
        """Whole numbers 0..15 [N], of any integer dtype, two a byte: uint8 [ceil(N / 2)].

        Raises ValueError for other numbers, which would spill into their neighbours, and for
        another number of axes.
        """
        if codes.ndim != 1:
            raise ValueError(f"codes: got shape {tuple(codes.shape)}, accepted is [N]")
        if ((codes < 0) | (codes > 15)).any():
            raise ValueError(f"codes: got {codes.min()}..{codes.max()}, accepted are 0..15")
        return _pack(codes.to(torch.uint8))

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """The first `count` codes, uint8 [count], of packed uint8 [ceil(count / 2)]; else ValueError."""
        if packed.shape != ((count + 1) // 2,):
            accepted = f"[{2 * packed.numel() - 1}, {2 * packed.numel()}]"
            raise ValueError(f"count: got {count} for {packed.numel()} bytes, accepted are {accepted}")
        return torch.stack([packed >> 4, packed & 15], 1).view(-1)[:count]


def _pack(codes: Tensor) -> Tensor:
    even = F.pad(codes, (0, codes.numel() % 2))
    return even[0::2] << 4 | even[1::2]


@functools.cache
@torch.inference_mode(False)  # a cached tensor serves in every mode
def _midpoints(device: torch.device) -> Tensor:
    """The 15 means of neighbouring levels."""
    levels = torch.tensor(NF4_LEVELS, device=device)
    return (levels[1:] + levels[:-1]) / 2


@functools.cache
@torch.inference_mode(False)
def _pairs(device: torch.device) -> Tensor:
    """For each of the 256 bytes its two levels, float32, side by side in one int64: an index_select
    of one number is 12 times as fast as one of a row of two.
    """
    levels = torch.tensor(NF4_LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1).view(torch.int64).view(256)
