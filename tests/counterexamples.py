"""What each mutant is caught by: python -m tests.counterexamples kv_pool serving paged_attention paged_write

Runs the property that each mutant of these ops names, as tests/test_mutants.py does, but goes on to the
smallest counterexample; prints the fault, that example, and what the property said.
"""

import re
import sys

import hypothesis

from perf_lab import machine, pytest_plugin

INVARIANT = re.compile(r"^state\.(?!evict|start|teardown)\w+\(\)$")  # calls without arguments


def example(notes: list[str]) -> str:
    """The calls and draws of a failing example, without the implementation and the checks between."""
    lines, depth = [], 0
    for line in "\n".join(notes).partition("\n\nYou can reproduce")[0].splitlines():
        if depth or line.strip().startswith("impl="):
            depth += line.count("(") - line.count(")")
        elif not INVARIANT.match(line.strip()) and not line.strip().startswith(
            ("device=", "Failing test case")
        ):
            lines.append(line)
    return "\n".join(lines)


def main(ops: list[str]) -> int:
    """Print a paragraph for each mutant of these ops; gives how many survived."""
    machine.interpret_without_gpu()
    pytest_plugin._set_profile()
    from . import test_mutants

    phases = [hypothesis.Phase.generate, hypothesis.Phase.shrink]
    parent = hypothesis.settings.get_profile("mutants")
    hypothesis.settings.register_profile("mutants", parent, phases=phases)
    survived = 0
    for mutant in test_mutants.MUTANTS:
        if mutant.impl.op.name not in ops:
            continue
        print(f"\n{mutant}: {mutant.fault}\n  {mutant.killed_by}")
        try:
            test_mutants.run_property(mutant)
        except BaseException as error:
            said = str(error).splitlines() or [type(error).__name__]
            found = example(getattr(error, "__notes__", []))
            print("\n".join(f"    {line}" for line in [*found.splitlines(), "", *said[:4]]))
        else:
            survived += 1
            print("    SURVIVED")
    return survived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
