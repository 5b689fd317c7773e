"""Deliberately wrong implementations, each with the property that must reject it.

A mutant proves that a check can fail. `tests/test_mutants.py` runs the named
property on every mutant and fails when the property accepts it.
"""

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


def mutant(op: Op, killed_by: str, **declared: Any) -> Callable[[Any], Any]:
    """Declare the decorated wrong function (or class) a mutant of `op`; its docstring says what is wrong.

    It is kept out of the op's table. `declared`: further fields of Implementation.
    """

    def add(fn: Any) -> Any:
        fields: dict[str, Any] = {"devices": ("cpu",), "dtypes": FLOATS, **declared}
        impl = Implementation(op, fn.__name__, fn, **fields)
        MUTANTS.append(Mutant(impl, fn.__doc__.strip().splitlines()[0], killed_by))
        return fn

    return add
