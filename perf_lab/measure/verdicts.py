"""Verdicts in words: the table, what it rests on, and the command `perf-lab gate`."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from perf_lab.measure import sides
from perf_lab.measure.gate import (
    CONFIDENCE,
    SAME,
    VERDICTS,
    CostChange,
    Judged,
    Policy,
    Spread,
    Timing,
    exit_code,
    fits,
)
from perf_lab.measure.tables import number_text, seconds_text

HEADER = ("verdict", "benchmark", "base", "head", "change", f"{CONFIDENCE:.0%} interval", "sessions", "note")


def cells(row: Judged) -> list[str]:
    """One line of the table, under HEADER."""
    name = row.name.rpartition("::")[2]
    if isinstance(row, CostChange):
        values = [" or ".join(map(number_text, side)) for side in (row.base, row.head)]
        change = f"{100 * (row.head[0] / row.base[0] - 1):+.3g}%" if row.base[0] and not row.note else ""
        return [row.verdict, f"{name}: {row.cost}", *values, change, "", "", row.note]
    times = [
        seconds_text(math.exp(float(np.median(side)))) if len(side) else "-" for side in (row.base, row.head)
    ]
    counts = f"{len(row.base)} / {len(row.head)}"
    if not (len(row.base) and len(row.head)):
        return [row.verdict, name, *times, "", "", counts, row.note]
    interval = (
        "" if row.interval is None else f"[{', '.join(f'{math.expm1(end):+.1%}' for end in row.interval)}]"
    )
    return [row.verdict, name, *times, f"{math.expm1(row.shift):+.1%}", interval, counts, row.note]


def lines(judged: Iterable[Judged]) -> list[list[str]]:
    """The header and a line for each benchmark, and each cost that changed; what matters first."""
    shown = [row for row in judged if isinstance(row, Timing) or row.verdict != SAME]
    return [list(HEADER), *map(cells, sorted(shown, key=place))]


def place(row: Judged) -> tuple[int, bool, str]:
    """What to sort by: verdict, times before costs, name."""
    return VERDICTS.index(row.verdict), isinstance(row, CostChange), row.name


def text_table(judged: Iterable[Judged]) -> str:
    """The table for a terminal."""
    grid = lines(judged)
    widths = [max(len(line[i]) for line in grid) for i in range(len(HEADER))]
    left = {0, 1, len(HEADER) - 1}
    return "\n".join(
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in grid
    )


def markdown_table(judged: Iterable[Judged]) -> str:
    """The table for a job summary."""
    header, *body = ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines(judged)]
    return "\n".join([header, "|" + "---|" * len(HEADER), *body])


def summary(judged: Sequence[Judged], between: Spread, policy: Policy) -> str:
    """How many of each verdict, and what they rest on."""
    times = Counter(row.verdict for row in judged if isinstance(row, Timing))
    costs = Counter(row.verdict for row in judged if isinstance(row, CostChange))
    told = [f"{_counts(times)} of {sum(times.values())} benchmarks"]
    if costs:
        told.append(f"exact costs: {_counts(costs)}")
    known = (
        f"two sessions of one code differ by {math.expm1(between.typical):.1%}"
        if between.df
        else "spread unknown"
    )
    floor = math.expm1(max(math.log1p(policy.floor), between.typical))
    told.append(f"floor {floor:.1%} ({known}); of suites without a change at most {policy.alarms:.3g} move")
    seen = [row.name for row in judged]
    told += [
        f"threshold {pattern!r} of pyproject.toml fits no benchmark here"
        for pattern in policy.thresholds
        if not any(fits(pattern, name) for name in seen)
    ]
    return "\n".join(told)


def _counts(verdicts: Counter[str]) -> str:
    return ", ".join(f"{verdicts[v]} {v}" for v in VERDICTS if verdicts[v])


def closing(code: int) -> str:
    """What the exit code says."""
    return {
        0: "exit code 0: nothing is slower",
        1: "exit code 1: slower",
        2: "exit code 2: no verdict",
        3: "exit code 3: nothing is slower, but something has no baseline (--new-ok accepts that)",
    }[code]


def report(
    judged: Sequence[Judged],
    between: Spread,
    policy: Policy,
    code: int,
    show: Callable[[str], None],
    to: Path | None,
) -> None:
    """Show table and summary, and append them as Markdown to the file `to`."""
    told = f"{summary(judged, between, policy)}\n{closing(code)}"
    show(f"{text_table(judged)}\n\n{told}")
    if to:
        with to.open("a", encoding="utf-8") as file:
            file.write(f"{markdown_table(judged)}\n\n{told}\n")


def gate(
    base: Sequence[Path],
    head: Sequence[Path],
    show: Callable[[str], None],
    *,
    across_machines: bool = False,
    new_ok: bool = False,
    to: Path | None = None,
) -> int:
    """Judge saved sessions; gives the exit code. Raises ResultsError or ValueError for what cannot be."""
    policy = sides.policy_from(Path("pyproject.toml"))
    old, new = sides.read(base, head, across_machines=across_machines)
    judged, between = sides.compare(old, new, policy)
    code = exit_code(judged, new_ok=new_ok)
    if fields := sides.differing(old.software, new.software) if old.software and new.software else "":
        show(f"base and head ran under different software: {fields}")
    report(judged, between, policy, code, show, to)
    return code
