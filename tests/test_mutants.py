"""Every mutant is rejected by the property that its declaration names."""

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from . import mutants
from .mutants import MUTANTS, Mutant

for module in pkgutil.iter_modules(mutants.__path__):
    importlib.import_module(f"{mutants.__name__}.{module.name}")

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
    """Run the mutant's property on it, in every dtype where the property asks for one."""
    module, _, name = mutant.killed_by.partition("::")
    test = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    dtypes = mutant.impl.dtypes if "dtype" in inspect.signature(test).parameters else (None,)
    with searching(test):
        for dtype in dtypes:
            test(device="cpu", impl=mutant.impl, **({"dtype": dtype} if dtype else {}))


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
