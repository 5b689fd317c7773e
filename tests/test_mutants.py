"""Every mutant is rejected by the property that its declaration names."""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from perf_lab import machine
from perf_lab.op import load_all

from .mutants import MUTANTS, Mutant, audit, generic, known_faults

audit.import_mutants()

hypothesis.settings.register_profile(
    "mutants",
    hypothesis.settings.get_profile("quick"),
    max_examples=200,  # it stops at the first counterexample
    derandomize=True,  # a mutant that survives must survive every time
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # no need to shrink
    report_multiple_bugs=False,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_killed(mutant: Mutant) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):  # the latter: an error that did not come
        run_property(mutant)


in_interpreter = pytest.mark.skipif(
    not machine.interpreting(), reason="mutants that are kernels need Triton's interpreter"
)


@in_interpreter
def test_every_property_rejects_a_mutant() -> None:
    killed, judged = audit.kills(), set(audit.properties())
    idle = {name for name in judged if not killed[name]}
    assert idle == set(audit.NO_MUTANT) & judged, "properties without a mutant, or with one after all"
    assert all(audit.NO_MUTANT.values())


def test_every_killer_is_a_property_that_exists() -> None:
    assert not sorted(set(audit.kills()) - set(audit.properties()))


def test_every_tolerance_rejects_the_five_plain_faults() -> None:
    """Zeros, one value a row, half, a dropped tile, an unwritten row: in each op that has a tolerance."""
    planted = {str(mutant) for mutant in MUTANTS}
    for name, op in load_all().items():
        if op.magnitude is not None:
            missing = [
                f.__name__ for f in generic.FAULTS if f"{name}-reference_with_{f.__name__}" not in planted
            ]
            assert not missing, f"{name}: name the property of its oracle in tests/mutants/generic.py ORACLE"


@in_interpreter
def test_every_public_report_is_planted_or_says_why_not() -> None:
    planted = {str(mutant) for mutant in MUTANTS}
    for row in known_faults.ROWS:
        assert (row in known_faults.PLANTED) != (row in known_faults.NOT_PLANTABLE), row
    for row, (_, names) in known_faults.PLANTED.items():
        assert names and set(names) <= planted, f"{row}: no such mutants: {sorted(set(names) - planted)}"


def run_property(mutant: Mutant) -> None:
    """Run the mutant's property on it, in every dtype and case that the property is parametrized over."""
    module, _, name = mutant.killed_by.partition("::")
    test = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    asked = inspect.signature(test).parameters
    with searching(test), pytest.MonkeyPatch.context() as monkeypatch:
        fixtures = {"monkeypatch": monkeypatch} if "monkeypatch" in asked else {}
        for case in audit.cases(test):
            dtypes = mutant.impl.dtypes if "dtype" in asked and "dtype" not in case else (None,)
            for dtype in dtypes:
                given = {**case, **fixtures, **({"dtype": dtype} if dtype else {})}
                test(device=device_of(mutant), impl=mutant.impl, **given)


def device_of(mutant: Mutant) -> str:
    """The CPU, or for a kernel that has no interpreter here, since there is a GPU, that."""
    return "cpu" if mutant.impl.why_not("cpu") is None else "cuda"


@contextlib.contextmanager
def searching(test: Any) -> Iterator[None]:
    """Have a property search under the "mutants" profile; `given` took its own when it was made."""
    before, own = hypothesis.settings.get_current_profile_name(), "_hypothesis_internal_use_settings"
    kept = getattr(test, own, None)
    hypothesis.settings.load_profile("mutants")
    setattr(test, own, hypothesis.settings())
    try:
        yield
    finally:
        hypothesis.settings.load_profile(before)
        setattr(test, own, kept)
