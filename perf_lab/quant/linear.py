"""A Linear that stores its weight in few bytes: dequantized to x's dtype, then multiplied."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perf_lab.quant.contract import Format, Quantized, int8, nf4, quantized_linear

VERSION = 1  # of what state_dict holds
STORED = ("codes", "scales", "_extra_state")  # they belong together


def as_format(format: str | Format, block_size: int = 64) -> Format:
    """The format called "int8" or "nf4", nf4 with this block size; a Format object is given back.

    Raises ValueError for another name or block size, TypeError for another object.
    """
    if format == "int8":
        return int8["torch"]()
    if format == "nf4":
        return nf4["torch"](block_size=block_size)
    if isinstance(format, str):
        raise ValueError(f"format: got {format!r}, accepted are 'int8' and 'nf4'")
    if not isinstance(format, Format):
        raise TypeError(f"format: got {type(format).__name__}, accepted are 'int8', 'nf4' and a Format")
    return format


@quantized_linear.register("torch")
class QuantizedLinear(nn.Module):
    """y = x @ weight.T + bias for x [..., in] of any float dtype; y [..., out] in x's dtype.

    Buffers `codes` and `scales` hold the weight [out, in]: no parameter, not trainable. Gradients
    reach x and the bias, which stays the Parameter that it was. Moving the module moves them;
    `.half()` and its like change the bias and the dtype of `weight`, never codes or scales, whose
    dtypes are part of the format.

    state_dict holds codes, scales, bias and `_extra_state`, the layout as uint8 text. Loading
    refuses another layout or shape, a float weight, and a part of the three, also when
    strict=False, and then changes nothing here.
    """

    codes: Tensor
    scales: Tensor
    bias: nn.Parameter | None

    def __init__(self, q: Quantized, bias: nn.Parameter | None, format: Format) -> None:
        super().__init__()
        self.out_features, self.in_features = q.shape
        self.format, self.layout, self.dtype = format, q.layout, q.dtype
        self.register_buffer("codes", q.codes)
        self.register_buffer("scales", q.scales)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: str | Format, block_size: int = 64) -> Self:
        """The same layer with its weight quantized, on the same device; `linear` stays as it is.

        Raises what `as_format` and the format's `quantize` raise, and TypeError for no nn.Linear.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: got {type(linear).__name__}, accepted is nn.Linear")
        format = as_format(format, block_size)
        layer = cls(format.quantize(linear.weight), linear.bias, format)
        return layer.train(linear.training)

    @property
    def stored(self) -> Quantized:
        """Codes and scales with their layout."""
        shape = (self.out_features, self.in_features)
        return Quantized(self.codes, self.scales, self.layout, shape, self.dtype)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], dequantized anew each time, for code that reads a Linear's weight."""
        return self.format.dequantize(self.stored)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]. Raises TypeError for no float dtype, ValueError for another width."""
        if not x.is_floating_point():
            raise TypeError(f"x: got {x.dtype}, accepted are float dtypes")
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x: got shape {tuple(x.shape)}, accepted are [..., {self.in_features}]")
        weight = self.format.dequantize(self.stored, x.dtype)  # [out, in]
        return F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))

    def extra_repr(self) -> str:
        """What print(module) shows."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, layout={self.layout!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What every conversion and move of a module goes through; keeps the dtypes of the buffers."""
        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.codes.device)).dtype
        kept = {"codes": self.codes, "scales": self.scales}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        self.dtype = dtype
        return self

    def _description(self) -> str:
        return f"version {VERSION}, {self.layout}, shape [{self.out_features}, {self.in_features}]"

    def get_extra_state(self) -> Tensor:
        """Version, layout and shape as text in uint8, which every file format of tensors can hold."""
        return torch.tensor(list(self._description().encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Nothing to set: `_load_from_state_dict` has compared it."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        *lists: list[str],
    ) -> None:
        """What load_state_dict calls; its last list collects what the final RuntimeError says."""
        fault = self._fault({name: state_dict.get(prefix + name) for name in (*STORED, "weight")})
        if fault:
            lists[-1].append(f"{prefix.rstrip('.') or 'state_dict'}: {fault}")
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    def _fault(self, state: dict[str, Any]) -> str | None:
        """Why this state cannot be loaded; None where it can, or where torch will say what is missing."""
        if state.pop("weight") is not None:
            return "got a float weight, accepted are codes and scales; load it before quantize_, not after"
        missing = [name for name, value in state.items() if value is None]
        if missing:
            return None if len(missing) == len(STORED) else f"got a part of {STORED}, without {missing}"
        found = _text(state["_extra_state"])
        if found != self._description():
            return f"got the layout {found!r}, accepted is {self._description()!r}"
        for name in ("codes", "scales"):
            got, own = (f"{t.dtype} {list(t.shape)}" for t in (state[name], getattr(self, name)))
            if got != own:
                return f"{name}: got {got}, accepted is {own}"
        return None


def _text(state: Any) -> str:
    if isinstance(state, Tensor) and state.dtype is torch.uint8:
        return bytes(state.flatten().tolist()).decode(errors="replace")
    return f"{type(state).__name__}, no uint8 text"
