"""`python -m tests.mutants`: the table of properties and the mutants that each rejects, in Markdown."""

from perf_lab import machine, pytest_plugin
from perf_lab.op import load_all

if __name__ == "__main__":
    machine.interpret_without_gpu()
    pytest_plugin._set_profile()
    load_all()

    from . import audit

    audit.import_mutants()
    print(audit.table())  # noqa: T201  # a command prints
