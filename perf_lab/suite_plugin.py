"""What pytest loads wherever perf_lab is installed: nothing, unless the run asks for perf_lab.suite.

So an install gives no other project's tests new options, nor a slower start.
"""

import pytest

PLUGINS = ("perf_lab.pytest_plugin", "perf_lab.measure.pytest_bench", "pytester")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Load the suite's plugins, and with them its options, before pytest reads those of the command line."""
    if not any(arg.startswith("perf_lab.suite") for arg in args):
        return
    from perf_lab import machine

    machine.interpret_without_gpu()
    for name in PLUGINS:
        early_config.pluginmanager.import_plugin(name)
