"""The one table of what exists: operations, and the implementations of each.

An `Op` is a contract: what goes in, what must come out, what it costs, and an
oracle that is obviously right. An `Implementation` is one way to do it,
declared by one `register(...)` beside its code. Everything else in the
project (properties, benchmarks, `python -m perf_lab list`) reads this table.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from perf_lab import machine

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Cost:
    """What one call must do at the least: floating-point operations, and bytes
    through device memory with each input read once and each output written once.
    """

    flops: int
    bytes: int


@dataclass(frozen=True)
class Limit:
    """Calls that an implementation does not take, as data.

    `applies` gets the arguments of the call; `reason` is shown wherever the
    limit makes something be skipped, and in the error that the call raises.
    """

    reason: str
    applies: Callable[..., bool]


class LimitError(NotImplementedError):
    """A call within the op's contract, but past a stated limit of the implementation."""


@dataclass(frozen=True, repr=False)
class Implementation:
    """One way to do an op.

    `fn` is a function, or for a stateful op a class. `devices` and `dtypes`
    are where it is held to the contract. `interpreted`: a Triton kernel, which
    runs on the CPU too, under Triton's interpreter (checked there, never timed).
    `known_failures` maps a test's name, name[device] or name[device-dtype] to the reason why it fails;
    such tests are strict xfails, so that a repaired fault is noticed.
    """

    op: "Op"
    name: str
    fn: Callable[..., Any]
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    interpreted: bool = False
    limits: tuple[Limit, ...] = ()
    known_failures: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments against the contract, then run.

        Raises ValueError or TypeError for what the contract refuses, LimitError
        for what this implementation does not take.
        """
        self.op.validate(*args, **kwargs)
        for limit in self.limits:
            if limit.applies(*args, **kwargs):
                raise LimitError(f"{self}: {limit.reason}")
        return self.fn(*args, **kwargs)

    def __str__(self) -> str:
        return f"{self.op.name}[{self.name}]"

    def __repr__(self) -> str:
        return f"<{self}>"

    def why_not(self, device: str) -> str | None:
        """Why it does not run on `device` ("cpu", "cuda", "mps") here; None where it does."""
        if device not in machine.devices():
            return f"{device}: {machine.why_missing(device)}"
        if device in self.devices:
            return None
        if not (self.interpreted and device == "cpu"):
            return f"{self}: made for {', '.join(self.devices)}, not for {device}"
        if not machine.interpreting():
            return f"{self}: on cpu only under Triton's interpreter (TRITON_INTERPRET=1)"
        return None

    def slow_on(self, device: str) -> bool:
        """Whether it runs there under Triton's interpreter only, some ms a tile: properties draw less."""
        return device not in self.devices

    @property
    def candidates(self) -> tuple[str, ...]:
        """The devices it can ever run on, the interpreter's included."""
        return (*(("cpu",) if self.interpreted else ()), *self.devices)


@dataclass(repr=False)
class Op:
    """A contract with its implementations.

    oracle       float64 tensors in, the right answer in float64 out; shares no
                 code with an implementation.
    baseline     the plain torch computation in the dtype of the inputs; its error
                 on an input scales the error that others are allowed there.
    magnitude    float64 tensors in, for each element of the output the size of
                 what was summed up to it: the unit in which errors are counted.
    reduction    the number of terms summed for one output element.
    validate     raises ValueError or TypeError, naming the argument, for a call
                 outside the contract.
    cost         the `Cost` of a call, from its arguments.
    reference    the implementation that others are compared with in benchmarks.
    """

    name: str
    oracle: Callable[..., Any] | None = None
    baseline: Callable[..., Any] | None = None
    magnitude: Callable[..., Any] | None = None
    reduction: Callable[..., int] | None = None
    validate: Callable[..., None] = lambda *args, **kwargs: None
    cost: Callable[..., Cost] | None = None
    reference: str = ""
    implementations: dict[str, Implementation] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __post_init__(self) -> None:
        if self.name in OPS:
            raise ValueError(f"name: an op called {self.name!r} exists already")
        OPS[self.name] = self

    def register(
        self,
        name: str,
        *,
        devices: tuple[str, ...] = ("cpu", "cuda", "mps"),
        dtypes: tuple[torch.dtype, ...] = FLOATS,
        interpreted: bool = False,
        limits: tuple[Limit, ...] = (),
        known_failures: Mapping[str, str] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add the decorated function (or class) to the op under `name`; gives it back unchanged.

        Raises ValueError when the name is taken or a device is not one of cpu, cuda, mps.
        """
        if name in self.implementations:
            raise ValueError(f"name: {self.name} has an implementation called {name!r} already")
        if unknown := set(devices) - set(machine.DEVICES):
            raise ValueError(f"devices: got {sorted(unknown)}, accepted are {machine.DEVICES}")

        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations[name] = Implementation(
                self, name, fn, devices, dtypes, interpreted, limits, dict(known_failures or {})
            )
            return fn

        return add

    def __getitem__(self, name: str) -> Implementation:
        if name in self.implementations:
            return self.implementations[name]
        if name in self.missing:
            raise KeyError(f"{self.name}[{name}] is not available here: {self.missing[name]}")
        raise KeyError(f"{self.name} has no implementation {name!r}; it has {list(self.implementations)}")

    def __iter__(self) -> Iterator[Implementation]:
        return iter(tuple(self.implementations.values()))

    def load(self, package: str, *modules: str) -> None:
        """Import the modules that register implementations, in this order.

        One whose third-party package is not installed is noted in `missing`
        with that reason; every other error is an error.
        """
        for module in modules:
            try:
                importlib.import_module(f"{package}.{module}")
            except ModuleNotFoundError as error:
                if error.name is None or error.name.startswith("perf_lab"):
                    raise
                self.missing[module] = f"needs the package {error.name}, which is not installed"


OPS: dict[str, Op] = {}

ROOMS = (
    "rms_norm",
    "add_rms_norm",
    "softmax",
    "attention",
    "paged_attention",
    "quant",
    "kv_cache",
    "model",
    "generate",
    "serving",
    "speculative",
)


ENTRY_POINTS = "perf_lab.implementations"
_installed: set[metadata.EntryPoint] = set()


def load_all() -> dict[str, Op]:
    """Import every room, and what other packages have to add, so that the table is complete; gives the table.

    An installed package adds an implementation by an entry point of the group `perf_lab.implementations`: its
    name is "op.name", its value the function or class ("softmax.mine" = "mypkg.kernels:softmax"). Raises
    ValueError that names the entry point where that does not hold.
    """
    for room in ROOMS:
        importlib.import_module(f"perf_lab.{room}")
    for point in set(metadata.entry_points(group=ENTRY_POINTS)) - _installed:
        _add_installed(point)
        _installed.add(point)
    return OPS


def _add_installed(point: metadata.EntryPoint) -> None:
    op_name, _, name = point.name.partition(".")
    where = f'entry point "{point.name}" = "{point.value}" of {ENTRY_POINTS}'
    if op_name not in OPS or not name:
        raise ValueError(f"{where}: accepted names are OP.NAME, with one of the ops {sorted(OPS)}")
    try:
        _register_outside(OPS[op_name], name, point.load())
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def outside(spec: str) -> Implementation:
    """Register a function from outside for this process: `spec` is "op=package.module:function".

    It is held to the op's whole contract on every device and float dtype,
    except what a `devices`, `dtypes`, `limits` or `known_failures` attribute on it says.
    Raises ValueError that says which part of `spec` does not hold.
    """
    op_name, _, target = spec.partition("=")
    module_name, _, attribute = target.partition(":")
    if not (op_name and module_name and attribute):
        raise ValueError(f"--impl: got {spec!r}, accepted is op=package.module:function")
    table = load_all()
    if op_name not in table:
        raise ValueError(f"--impl: no op {op_name!r} in {spec!r}; there are {sorted(table)}")
    _register_outside(table[op_name], target, _attribute(spec, module_name, attribute))
    return table[op_name][target]


def _register_outside(op: Op, name: str, fn: Any) -> None:
    keys = ("devices", "dtypes", "interpreted", "limits", "known_failures")
    op.register(name, **{key: getattr(fn, key) for key in keys if hasattr(fn, key)})(fn)


def _attribute(spec: str, module_name: str, attribute: str) -> Any:
    try:
        found: ModuleType | Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"--impl: cannot import {module_name!r} of {spec!r}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"--impl: {module_name!r} of {spec!r} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"--impl: {attribute!r} of {spec!r} is {type(found).__name__}, not callable")
    return found
