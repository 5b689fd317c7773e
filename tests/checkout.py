"""The repository, for tests of what only it holds: the wheel's perf_lab.suite has no README, no results."""

from pathlib import Path

import pytest

import perf_lab

ROOT = Path(__file__).parents[1]
IMPORTS = str(Path(perf_lab.__file__).parents[1])  # what PYTHONPATH needs for another process

in_checkout = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="reads files of the repository, and this is the wheel"
)
