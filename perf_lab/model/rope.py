"""Rotary speeds: by how many radians a pair of a head's dimensions turns from one position to the next.

Plain, pair j of D/2 turns by theta^(-2j/D). Models that were stretched to longer sequences turn more slowly:

Linear    all pairs by 1 / factor (Chen et al., Position Interpolation, arXiv:2306.15595).
Llama3    pairs that turn less than low_freq_factor times within original_length tokens by 1 / factor, those
          that turn more than high_freq_factor times as before, the ones between in proportion (Llama 3.1).
Yarn      likewise between the pairs that turn beta_slow and beta_fast times, along the pair's index, and
          scores are sharper (Peng et al., YaRN, arXiv:2309.00071).
Dynamic   theta grows with the sequence once it is longer than original_length (NTK-aware scaling).
LongRope  each pair by a factor of its own; another set of them once the sequence is longer than
          original_length (Ding et al., LongRoPE, arXiv:2402.13753).

The last two go by the length of the sequence: that of the call's last token, position + 1, as transformers
has it. Keys that lie in a cache keep the turn of the call that wrote them: past original_length a split into
calls gives what the same split gives there, and not what one call over the whole gives.

gain: factor of cosines and sines; scores have its square. Formulas as in transformers' ROPE_INIT_FUNCTIONS,
in float64 there where transformers rounds to float32: at position p the angles differ by up to p * 2^-24.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Linear:
    """Positions count 1 / factor."""

    factor: float
    gain: ClassVar[float] = 1.0
    by_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_positive(self, "factor")

    def speeds(self, plain: Tensor, theta: float) -> Tensor:
        """Radians a position [D/2], from those without scaling."""
        return plain / self.factor


@dataclass(frozen=True)
class Llama3:
    """Slow pairs are slowed down, fast ones not."""

    factor: float
    original_length: int
    low_freq_factor: float
    high_freq_factor: float
    gain: ClassVar[float] = 1.0
    by_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "original_length", "low_freq_factor", "high_freq_factor")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: got {self.high_freq_factor}, accepted are numbers above "
                f"low_freq_factor, {self.low_freq_factor}"
            )

    def speeds(self, plain: Tensor, theta: float) -> Tensor:
        """Radians a position [D/2], from those without scaling."""
        turns = self.original_length * plain / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(plain / self.factor, plain, kept.clamp(0, 1))


@dataclass(frozen=True)
class Yarn:
    """As Llama3, by the pair's index; truncate: the bounds of the ramp are whole indices."""

    factor: float
    original_length: int
    gain: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    by_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "original_length", "gain", "beta_fast", "beta_slow")

    def speeds(self, plain: Tensor, theta: float) -> Tensor:
        """Radians a position [D/2], from those without scaling."""
        half = len(plain)
        low, high = (self._index(beta, theta, half) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        width = high - low or 1e-3  # a step, where the two bounds are one
        slowed = ((torch.arange(half, dtype=plain.dtype) - low) / width).clamp(0, 1)
        return torch.lerp(plain, plain / self.factor, slowed)

    def _index(self, turns: float, theta: float, half: int) -> float:
        """The pair that turns so often within the original length."""
        return half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)


@dataclass(frozen=True)
class Dynamic:
    """theta grows so that the slowest pair turns as far in the whole sequence as it did in the original."""

    factor: float
    original_length: int
    gain: ClassVar[float] = 1.0
    by_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "original_length")

    def rows(self, plain: Tensor) -> Tensor:
        """What `speeds_at` chooses from, [2, D/2]: speeds, and exponents of the growth."""
        if len(plain) == 1:
            raise ValueError("rope: got Dynamic for heads of 2, accepted are heads of 4 and above")
        index = torch.arange(len(plain), dtype=plain.dtype)
        return torch.stack((plain, -index / (len(plain) - 1)))

    def speeds_at(self, rows: Tensor, length: Tensor) -> Tensor:
        """Radians a position for sequences of these lengths: length [..., 1] -> [..., D/2]."""
        longer = length.clamp(min=self.original_length).to(rows.dtype) / self.original_length
        return rows[0] * (1 + self.factor * (longer - 1)) ** rows[1]


@dataclass(frozen=True)
class LongRope:
    """One factor a pair: `short` for sequences of up to original_length, `long` for longer ones."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    gain: float
    by_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_positive(self, "original_length", "gain")
        for name in ("short", "long"):
            factors = getattr(self, name)
            if not (isinstance(factors, tuple) and all(_is_positive(factor) for factor in factors)):
                raise ValueError(f"{name}: got {factors!r}, accepted is a tuple of positive numbers")

    def rows(self, plain: Tensor) -> Tensor:
        """What `speeds_at` chooses from, [2, D/2]: the speeds of short and of long sequences."""
        for name in ("short", "long"):
            if len(getattr(self, name)) != len(plain):
                raise ValueError(
                    f"rope: got {len(getattr(self, name))} {name} factors, accepted are {len(plain)}, "
                    "one for each pair of a head's dimensions"
                )
        return plain / torch.tensor((self.short, self.long), dtype=plain.dtype)

    def speeds_at(self, rows: Tensor, length: Tensor) -> Tensor:
        """Radians a position for sequences of these lengths: length [..., 1] -> [..., D/2]."""
        return torch.where(length > self.original_length, rows[1], rows[0])


Fixed = Linear | Llama3 | Yarn
ByLength = Dynamic | LongRope
Scaling = Fixed | ByLength


def plain_speeds(theta: float, head_dim: int) -> Tensor:
    """Radians a position without scaling: theta^(-2j/D) for j < D/2, float64 on the CPU."""
    half = head_dim // 2
    return theta ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)


def _is_positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf


def _check_positive(scaling: object, *names: str) -> None:
    for name in names:
        if not _is_positive(getattr(scaling, name)):
            raise ValueError(f"{name}: got {getattr(scaling, name)!r}, accepted are positive finite numbers")
