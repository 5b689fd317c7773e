"""Which property rejects which mutants, and which public fault reports the mutants repeat."""

import importlib
import inspect
import itertools
import pkgutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perf_lab.op import Implementation

from . import MUTANTS, Mutant
from .known_faults import NOT_PLANTABLE, PLANTED, ROWS

TESTS = __package__.rpartition(".")[0]

# Properties that no mutant can fail on the CPU, and why.
NO_MUTANT = {
    "test_rms_norm::test_replays_from_a_cuda_graph": "needs a GPU",
    "test_add_rms_norm::test_replays_from_a_cuda_graph": "needs a GPU",
    "test_softmax::test_replays_from_a_cuda_graph": "needs a GPU",
}


def import_mutants() -> None:
    """Import every module of mutants, which fills MUTANTS."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")


def parametrized(test: Any) -> Iterable[tuple[list[str], list[tuple[Any, ...]]]]:
    """The names and the rows of values of each parametrize mark of a test."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names, values = mark.args[:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        yield names, [row_of(value, len(names)) for value in values]


def row_of(value: Any, width: int) -> tuple[Any, ...]:
    """One entry of a parametrize mark, be it a pytest.param, a tuple or a single value."""
    if hasattr(value, "marks"):
        return tuple(value.values)
    return tuple(value) if width > 1 else (value,)


def cases(test: Any) -> list[dict[str, Any]]:
    """What a test is parametrized over beside its implementations: keyword arguments, one case each."""
    axes = [
        [dict(zip(names, row, strict=True)) for row in rows]
        for names, rows in parametrized(test)
        if "impl" not in names
    ]
    return [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*axes)]


def judges(test: Any) -> bool:
    """Whether a test is parametrized over implementations."""
    for names, rows in parametrized(test):
        if "impl" in names:
            return all(isinstance(row[names.index("impl")], Implementation) for row in rows)
    return False


def properties() -> list[str]:
    """Every test of an implementation, as "test_module::test_function"; imports all test modules."""
    found = []
    for file in sorted(Path(__file__).parents[1].glob("test_*.py")):
        module = importlib.import_module(f"{TESTS}.{file.stem}")
        for name, test in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and test.__module__ == module.__name__ and judges(test):
                found.append(f"{file.stem}::{name}")
    return found


def kills() -> dict[str, list[Mutant]]:
    """The mutants that each property is declared to reject, which tests/test_mutants.py verifies."""
    killed = defaultdict(list)
    for mutant in MUTANTS:
        killed[mutant.killed_by].append(mutant)
    return killed


def table() -> str:
    """Markdown: each property with the mutants it rejects and their faults, then the reports with theirs."""
    killed, rows = kills(), []
    for name in properties():
        rows += [(name, str(mutant), mutant.fault) for mutant in killed[name]]
        if not killed[name]:
            rows.append((name, "none", NO_MUTANT.get(name, "MISSING")))
    reports = [
        (row, PLANTED[row][0], ", ".join(PLANTED[row][1]))
        if row in PLANTED
        else (row, NOT_PLANTABLE[row][0], f"none: {NOT_PLANTABLE[row][1]}")
        for row in ROWS
    ]
    distinct, judged = len({str(mutant) for mutant in MUTANTS}), len({name for name, *_ in rows})
    return "\n\n".join(
        (
            f"{distinct} mutants, {judged} properties, {len(PLANTED)} of {len(ROWS)} public reports.",
            markdown(("property", "mutant", "fault"), rows),
            markdown(("row", "report", "mutants"), reports),
        )
    )


def markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table; a bar within a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
