"""Replace the Linear layers of a module, in place: all of them or none."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from perf_lab.quant.contract import Format, quantize_op
from perf_lab.quant.linear import QuantizedLinear, as_format

M = TypeVar("M", bound=nn.Module)
Skip = str | Iterable[str] | Callable[[str, nn.Module], bool]


@quantize_op.register("torch")
def quantize_(module: M, format: str | Format, skip: Skip = (), block_size: int = 64) -> M:
    """Replace each nn.Linear in `module` by a QuantizedLinear of its weight; gives `module` back.

    format      "int8", "nf4" (block_size is its block size), or a Format object.
    skip        dotted paths or shell patterns ("lm_head", "*.down_proj", "model.layers.0"); a
                pattern that matches a module leaves out all that is in it. Or a function of
                (path, linear) that says True for what stays.
    left alone  what is quantized already, and subclasses of nn.Linear, which do something else.

    Raises ValueError, and has changed nothing then, for: an unknown format; a pattern that matches
    no module; a weight that also lives at another path (a tied lm_head: skip it), both named; a
    layer with hooks or more parameters than weight and bias, which the replacement would lose; a
    weight that is not finite; a bare nn.Linear, which has no parent to be replaced in. TypeError
    for weights other than float32, float16 and bfloat16.
    """
    chosen = as_format(format, block_size)
    if type(module) is nn.Linear:
        raise ValueError(
            "module: got a bare Linear, accepted is what holds one; see QuantizedLinear.from_linear"
        )
    layers = _layers(module, skip)
    _refuse_shared(module, layers)
    for path, linear in layers.items():
        _refuse_lossy(path, linear)
    ready = {path: _quantized(path, linear, chosen) for path, linear in layers.items()}
    for path, layer in ready.items():
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, layer)
    return module


def _layers(module: nn.Module, skip: Skip) -> dict[str, nn.Linear]:
    """What is to be replaced, by its path; a layer at two places comes twice."""
    modules = dict(module.named_modules(remove_duplicate=False))
    linears = {path: m for path, m in modules.items() if type(m) is nn.Linear}
    if callable(skip):
        return {path: linear for path, linear in linears.items() if not skip(path, linear)}
    patterns = [skip] if isinstance(skip, str) else list(skip)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in modules):
            raise ValueError(f"skip: got {pattern!r}, which matches no module of {type(module).__name__}")
    return {path: linear for path, linear in linears.items() if not _matches(path, patterns)}


def _matches(path: str, patterns: list[str]) -> bool:
    """Whether a pattern matches the path or one that leads to it."""
    parts = path.split(".")
    ancestors = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatchcase(ancestor, pattern) for ancestor in ancestors for pattern in patterns)


def _refuse_shared(module: nn.Module, layers: dict[str, nn.Linear]) -> None:
    """Raise ValueError when the weight of one of the layers has a second path."""
    paths: dict[int, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    for linear in layers.values():
        if len(places := paths[id(linear.weight)]) > 1:
            shared = " and ".join(places)
            raise ValueError(
                f"module: {shared} are one tensor, accepted are weights of their own; skip its layers"
            )


def _refuse_lossy(path: str, linear: nn.Linear) -> None:
    """Raise ValueError for a layer with more to it than weight and bias."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks)
    if any(hooks) or "forward" in vars(linear):
        raise ValueError(f"module: {path} has hooks, which its replacement would lose; see skip")
    if extra := set(linear._parameters) - {"weight", "bias"}:
        raise ValueError(
            f"module: {path} has the parameters {sorted(extra)} besides weight and bias; see skip"
        )


def _quantized(path: str, linear: nn.Linear, format: Format) -> QuantizedLinear:
    try:
        return QuantizedLinear.from_linear(linear, format)
    except (TypeError, ValueError) as error:
        raise type(error)(f"module: {path}.weight: {error}") from error
