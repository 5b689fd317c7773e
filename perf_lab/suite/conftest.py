"""The suites' plugins are loaded by pytest's entry point of this package, perf_lab.suite_plugin."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Say what is missing where the package was copied and not installed."""
    if not config.pluginmanager.has_plugin("perf_lab.pytest_plugin"):
        raise pytest.UsageError(
            "perf_lab.suite: install perf-lab (pip install), a copied folder has no options"
        )
