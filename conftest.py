"""Both suites: kernels run under Triton's interpreter where there is no GPU."""

from perf_lab import machine

machine.interpret_without_gpu()

pytest_plugins = ["perf_lab.pytest_plugin", "perf_lab.measure.pytest_bench", "pytester"]
