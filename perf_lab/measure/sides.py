"""Saved sessions as the two sides of a comparison.

One results file is one session. Files of different machines are no side, nor
are two copies of one session; both are refused with the reason.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf_lab.measure import results
from perf_lab.measure.gate import EXACT, Judged, Policy, Spread, judge, judge_costs, spread
from perf_lab.measure.results import ResultsError
from perf_lab.measure.tables import number, rows_in

# where a results file says what times are only comparable within
MACHINE = {
    "machine": ("node",),
    "system": ("system",),
    "architecture": ("machine",),
    "processor": ("cpu", "brand_raw"),
    "devices": ("perf_lab", "devices"),
    "cores": ("perf_lab", "cores"),
    "threads": ("perf_lab", "threads"),
}
# what may be the very thing that is compared: stated, not refused
SOFTWARE = {
    "Python": ("python_version",),
    "torch": ("perf_lab", "torch"),
    "triton": ("perf_lab", "triton"),
    "CUDA": ("perf_lab", "cuda"),
    "driver": ("perf_lab", "driver"),
}
# of a benchmark: times of different work, or measured in different ways, have no ratio
WORK = ("dtype", "shapes", "method", "cache")

Facts = Mapping[str, str]


@dataclass
class Side:
    """The sessions of one side, by benchmark. names: the full name that pytest runs it by; work:
    what its sessions say it did; first: the file that `machine` and `software` come from. across:
    whether sessions of several machines may be in it.
    """

    across: bool = False

    times: dict[str, list[float]] = field(default_factory=dict)
    costs: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    work: dict[str, set[str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    machine: Facts = field(default_factory=dict)
    software: Facts = field(default_factory=dict)
    first: Path | None = None

    def add(self, path: Path, content: dict[str, Any], without: Sequence[str] = ()) -> None:
        """Add a session. Parameters in `without` do not tell its benchmarks apart. Raises ResultsError
        for what cannot be used, and for another machine than that of the first.
        """
        seen = set()
        for row in rows_in(content, path):
            key = key_of(row, without)
            if key in seen:
                raise ResultsError(f"{path}: has more than one {key}")
            if row["seconds"] <= 0:
                raise ResultsError(f"{path}: {row['name']} took {row['seconds']:g} s, which has no ratio")
            seen.add(key)
            self.names[key] = row["name"]
            self.times.setdefault(key, []).append(row["seconds"])
            self.work.setdefault(key, set()).add(_work(row["info"]))
            for cost in EXACT:
                if (value := number(row["info"], cost)) is not None:
                    self.costs.setdefault(key, {}).setdefault(cost, []).append(value)
        if seen:
            one = Side(
                self.across, machine=facts(content, MACHINE), software=facts(content, SOFTWARE), first=path
            )
            refuse_others(self, one)
            self.first, self.machine, self.software = (
                self.first or path,
                self.machine or one.machine,
                one.software,
            )


def key_of(row: Mapping[str, Any], without: Sequence[str]) -> str:
    """What names the benchmark on both sides: its full name, or without some parameters what is left."""
    if not set(without) & set(row["params"]):
        return row["name"]
    left = ",".join(f"{name}={value}" for name, value in row["params"].items() if name not in without)
    return f"{row['name'].partition('[')[0]}[{left}]"


def _work(info: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {info[name]}" for name in WORK if name in info)


def facts(content: Mapping[str, Any], of: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """What a file's machine_info says, as text; "not stated" where it does not."""
    found = {}
    for name, steps in of.items():
        value: Any = content.get("machine_info")
        for step in steps:
            value = value.get(step) if isinstance(value, Mapping) else None
        found[name] = "not stated" if value is None else str(value)
    return found


def differing(first: Facts, second: Facts) -> str:
    """The fields that differ, with both values."""
    return ", ".join(
        f"{name} ({first[name]} / {second[name]})" for name in first if first[name] != second[name]
    )


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Files as they are, folders as the results in them, but for those of runs that were killed."""
    found = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        inside = [file for file in inside if file == path or not file.name.startswith(results.UNFINISHED)]
        if not inside:
            raise ResultsError(f"{path}: no results (*.json) in this folder")
        found += inside
    return found


def read(
    base: Iterable[Path],
    head: Iterable[Path],
    *,
    across_machines: bool = False,
    without: Sequence[str] = (),
) -> tuple[Side, Side]:
    """Both sides, from files and folders.

    Raises ResultsError for a file without results, for a session that is given
    twice, and, unless `across_machines`, for files of different machines.
    """
    sides = Side(across_machines), Side(across_machines)
    seen: dict[str, Path] = {}
    for side, paths in zip(sides, (base, head), strict=True):
        for path in files_in(paths):
            content = results.load(path)
            _refuse_copies(path, content, seen)
            side.add(path, content, without)
    refuse_others(*sides)
    if across_machines and not set(sides[0].times) & set(sides[1].times) and "device" not in without:
        return read(base, head, across_machines=True, without=(*without, "device"))
    return sides


def _refuse_copies(path: Path, content: dict[str, Any], seen: dict[str, Path]) -> None:
    """A session counts once, whatever its copies are called."""
    if not content["benchmarks"]:
        return
    identity = json.dumps(content["benchmarks"], sort_keys=True)
    if identity in seen:
        raise ResultsError(f"{path}: is the same session as {seen[identity]}; it counts once")
    seen[identity] = path


def refuse_others(known: Side, other: Side) -> None:
    """Raise ResultsError, naming the fields, when both have sessions, of different machines."""
    fields = differing(known.machine, other.machine) if known.first and other.first else ""
    if fields and not known.across:
        raise ResultsError(
            f"{known.first} and {other.first} are of different machines: {fields};"
            " --across-machines compares them all the same"
        )


def compare(base: Side, head: Side, policy: Policy) -> tuple[list[Judged], Spread]:
    """Every benchmark and exact cost, judged, and the spread between the sessions.

    Raises ResultsError when neither side has a benchmark.
    """
    if not base.times and not head.times:
        raise ResultsError("no benchmark on either side: nothing was compared")
    timings = judge(base.times, head.times, policy)
    overrule(timings, base, head)
    return [*timings, *judge_costs(base.costs, head.costs)], spread(base.times, head.times)


def overrule(timings: Iterable[Any], base: Side, head: Side) -> None:
    """Have no verdict on times of different work."""
    for timing in timings:
        works = base.work.get(timing.name), head.work.get(timing.name)
        if all(works) and works[0] != works[1]:
            told = " / ".join(" or ".join(sorted(work)) for work in works if work)
            timing.overruled = f"not the same work: {told}"


def policy_from(path: Path) -> Policy:
    """The policy in a pyproject.toml, under [tool.perf_lab.gate]: alarms, floor, and a table of
    thresholds. Without the file or the table it is the default. Raises ValueError that names the
    file and the key for what is not accepted.
    """
    if not path.exists():
        return Policy()
    try:
        stated = (
            tomllib.loads(path.read_text(encoding="utf-8"))
            .get("tool", {})
            .get("perf_lab", {})
            .get("gate", {})
        )
        if unknown := sorted(set(stated) - {"alarms", "floor", "thresholds"}):
            raise ValueError(f"got {unknown}, accepted are alarms, floor and thresholds")
        return Policy(**stated)
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise ValueError(f"{path}: [tool.perf_lab.gate]: {error}") from error
