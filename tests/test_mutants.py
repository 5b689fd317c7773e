"""Every mutant is rejected by the property that its declaration names."""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from .mutants import MUTANTS, Mutant, audit

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
                test(device="cpu", impl=mutant.impl, **given)


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
