"""Deliberately wrong implementations, each with the property that must reject it.

A mutant proves that a check can fail. `tests/test_mutants.py` runs the named
property on every mutant and fails when the property accepts it.
`python -m tests.mutants` prints each property with the mutants that it rejects.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perf_lab.op import FLOATS, Implementation, Op


@dataclass(frozen=True)
class Mutant:
    """`impl` is wrong as `fault` says; `killed_by` is "test_module::test_function"."""

    impl: Implementation
    fault: str
    killed_by: str

    def __str__(self) -> str:
        return f"{self.impl.op.name}-{self.impl.name}"


MUTANTS: list[Mutant] = []


def mutant(op: Op, killed_by: str | tuple[str, ...], **declared: Any) -> Callable[[Any], Any]:
    """Declare the decorated wrong function (or class) a mutant of `op`; its docstring says what is wrong.

    It is kept out of the op's table. killed_by: one property, or several, each of which must reject it.
    `declared`: further fields of Implementation.
    """
    killers = (killed_by,) if isinstance(killed_by, str) else killed_by

    def add(fn: Any) -> Any:
        fields: dict[str, Any] = {"devices": ("cpu",), "dtypes": FLOATS, **declared}
        impl = Implementation(op, fn.__name__, fn, **fields)
        fault = fn.__doc__.strip().splitlines()[0]
        MUTANTS.extend(Mutant(impl, fault, killer) for killer in killers)
        return fn

    return add


def unguarded(op: Op) -> Op:
    """The op without the check of arguments that stands before all of its implementations."""
    lax = copy.copy(op)
    lax.validate = lambda *args, **kwargs: None
    return lax
