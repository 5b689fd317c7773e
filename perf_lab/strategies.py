"""Hypothesis strategies: tensors as small recipes, lengths, head layouts, hard values.

Tests draw an `Input`, not a tensor: a recipe of a few words whose repr rebuilds
the very same tensor, so that a failure can be pasted and run again.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from hypothesis import strategies as st
from torch import Tensor

VALUES = ("normal", "zeros", "ties", "denormal", "huge", "outliers", "negative")
KEPT = 6
LAYOUTS = ("contiguous", "transposed", "strided", "padded_rows", "expanded", "offset")


def dtype_name(dtype: torch.dtype) -> str:
    """The name alone: bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Input:
    """The recipe of one tensor.

    values: "normal" (standard normal), "zeros", "ties" (few distinct values),
        "denormal" (below the smallest normal number), "huge" (up to 0.9 of the
        largest finite number's square root), "outliers" (normal, one in 64 times 1000),
        "negative" (all below -1). For masks, of bool too: "holes" (normal or True; one element in
        three, and all of one row in eight, is -inf or False).
    layout: "contiguous", "transposed" (last two axes stored swapped), "strided"
        (every second element of the last axis), "padded_rows" (rows of a wider
        buffer), "expanded" (stride 0 on the first axis), "offset" (starts inside its storage).
        What the buffer holds outside the tensor is NaN.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    seed: int = 0
    values: str = "normal"
    layout: str = "contiguous"

    def __repr__(self) -> str:
        changed = [f.name for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return f"Input({', '.join([str(self.shape), *(f'{n}={getattr(self, n)!r}' for n in changed)])})"

    def on(self, device: str = "cpu") -> Tensor:
        """The tensor; the same numbers on every device."""
        dtype = getattr(torch, self.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        plain = _fill(self.values, self.shape, dtype, generator)
        return _lay_out(plain.to(device), self.layout)


class Kept(Input):
    """An `Input` whose tensor is kept for the next who asks: drawing gigabytes takes a CPU seconds. For
    those that only read it.
    """

    def on(self, device: str = "cpu") -> Tensor:
        """The tensor of the recipe, the same one for the KEPT recipes asked for last."""
        return _kept(Input(self.shape, self.dtype, self.seed, self.values, self.layout), device)


@functools.lru_cache(maxsize=KEPT)
def _kept(recipe: Input, device: str) -> Tensor:
    return recipe.on(device)


def _fill(values: str, shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    if values == "holes":
        rows = torch.rand((*shape[:-1], 1), generator=g) < 1 / 8
        holes = (torch.rand(shape, generator=g) < 1 / 3) | rows
        return ~holes if dtype is torch.bool else x.masked_fill(holes, -math.inf).to(dtype)
    finfo = torch.finfo(dtype)
    if values == "normal":
        return x.to(dtype)
    if values == "zeros":
        return torch.zeros(shape, dtype=dtype)
    if values == "ties":
        return torch.randint(-2, 3, shape, generator=g).to(dtype)
    if values == "denormal":
        return (x.clamp(-3, 3) / 3 * finfo.smallest_normal).to(dtype)
    if values == "huge":
        return (x.clamp(-3, 3) / 3 * 0.9 * math.sqrt(finfo.max)).to(dtype)
    if values == "outliers":
        return torch.where(torch.rand(shape, generator=g) < 1 / 64, 1000 * x, x).to(dtype)
    if values == "negative":
        return (-1 - x.abs()).to(dtype)
    raise ValueError(f"values: got {values!r}, accepted are {VALUES}")


def _lay_out(x: Tensor, layout: str) -> Tensor:
    """The same tensor as a view with the named strides, NaN around it."""
    if layout == "contiguous" or x.ndim == 0:
        return x
    if layout == "transposed" and x.ndim >= 2:
        return x.mT.contiguous().mT
    if layout == "expanded":
        return x[:1].clone().expand(x.shape) if x.shape[0] else x
    if layout == "strided":
        buffer = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
        view = buffer[..., ::2]
    elif layout == "padded_rows" and x.ndim >= 2:
        buffer = x.new_full((*x.shape[:-1], x.shape[-1] + 7), math.nan)
        view = buffer[..., : x.shape[-1]]
    else:
        view = x.new_full((x.numel() + 3,), math.nan)[3:].view(x.shape)
    return view.copy_(x)


def inputs(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    values: Sequence[str] = VALUES,
    layouts: Sequence[str] = LAYOUTS,
) -> st.SearchStrategy[Input]:
    """An `Input` of this shape and dtype, by default of any values and layout."""
    return st.builds(
        Input,
        shape=st.just(shape),
        dtype=st.just(dtype_name(dtype)),
        seed=st.integers(0, 2**16),
        values=st.sampled_from(values),
        layout=st.sampled_from(layouts),
    )


def lengths(largest: int, smallest: int = 0) -> st.SearchStrategy[int]:
    """A length from `smallest` to `largest`; powers of two and their neighbours come often."""
    edges = {0, 1, 2, 3, largest} | {2**k + d for k in range(2, largest.bit_length() + 1) for d in (-1, 0, 1)}
    return st.one_of(
        st.sampled_from(sorted(e for e in edges if smallest <= e <= largest)),
        st.integers(smallest, largest),
    )
