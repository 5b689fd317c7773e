"""Saved runs side by side: the newest result of each benchmark, where curves cross, roofs, history.

Numbers only; `plots` draws them and `report` writes them down.
"""

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from perf_lab.measure import results
from perf_lab.measure.tables import cleaned, device_of, function_of, impl_of, number, order, rows_in

CLEAR = math.log(1.03)  # the gate's floor: curves that are closer than 3% have no order
WORK = ("dtype", "shapes", "flops", "least_bytes")  # what says that two results did the same work

Row = dict[str, Any]
Key = tuple[str, tuple[tuple[str, str], ...]]
Curve = dict[float, float]  # seconds by length


@dataclass(frozen=True)
class Run:
    """One results file; `facts` is what perf_lab noted about the machine, {} in foreign files."""

    path: Path
    machine: str
    facts: dict[str, Any]
    when: datetime.datetime | None
    commit: str
    rows: list[Row]

    @property
    def label(self) -> str:
        """Date and commit, or the file's name where it has no date."""
        if self.when is None:
            return self.path.stem
        return " ".join(filter(None, [f"{self.when:%Y-%m-%d %H:%M}", self.commit]))


class Side(NamedTuple):
    """A device of a machine."""

    machine: str
    device: str


def default_runs() -> list[Path]:
    """The committed results below the working directory, else what was autosaved there."""
    found = sorted(Path("bench/results").glob("*/*.json")) or sorted(Path(".benchmarks").glob("*/*.json"))
    if not found:
        raise results.ResultsError(
            "no results in bench/results or .benchmarks; `pytest bench --benchmark-autosave` makes some"
        )
    return found


def load_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in these files and folders (a machine's, or one that holds machines'), oldest
    first, each file once. What lies deeper is no run of its own: `ab` keeps its sessions there.

    Raises ResultsError for a file that holds no results and a folder without files.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        inside = sorted([*path.glob("*.json"), *path.glob("*/*.json")]) if path.is_dir() else [path]
        if not inside:
            raise results.ResultsError(f"{path}: no results (*.json) in this folder")
        files.update({file.resolve(): file for file in inside})
    earliest = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    return sorted(map(_run, files.values()), key=lambda run: (run.when or earliest, run.path))


def _run(path: Path) -> Run:
    content = results.load(path)
    machine, commit = (cleaned(_mapping(content.get(name))) for name in ("machine_info", "commit_info"))
    facts = _mapping(machine.get("perf_lab"))
    name = facts.get("name") or machine.get("node") or "unknown machine"
    mark = str(commit.get("id") or "")[:7] + ("+" if commit.get("dirty") else "")
    return Run(path, str(name), facts, _when(content.get("datetime")), mark, rows_in(content, path))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _when(text: Any) -> datetime.datetime | None:
    try:
        when = datetime.datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return when.replace(tzinfo=datetime.UTC) if when.tzinfo is None else when.astimezone(datetime.UTC)


def key_of(row: Row, *without: str) -> Key:
    """What makes it the same benchmark in another run: its function and parameters."""
    params = sorted((name, str(value)) for name, value in row["params"].items() if name not in without)
    return row["name"].partition("[")[0], tuple(params)


def newest(runs: Iterable[Run]) -> dict[str, list[Row]]:
    """By machine, each benchmark's newest row. Runs come oldest first."""
    machines: dict[str, dict[Key, Row]] = {}
    for run in runs:
        machines.setdefault(run.machine, {}).update({key_of(row): row for row in run.rows})
    return {machine: list(rows.values()) for machine, rows in machines.items()}


def by_function(runs: Sequence[Run]) -> dict[str, dict[Side, list[Row]]]:
    """The newest rows of each benchmark function, by machine and device."""
    found: dict[str, dict[Side, list[Row]]] = {}
    for machine, rows in newest(runs).items():
        for row in rows:
            sides = found.setdefault(function_of(row), {})
            sides.setdefault(Side(machine, device_of(row)), []).append(row)
    return found


def curves(rows: Iterable[Row]) -> dict[str, dict[str, Curve]]:
    """Seconds by length for each implementation, by the text of the other parameters.

    A row without a length, or with a time that has no logarithm, is in none.
    """
    found: dict[str, dict[str, Curve]] = {}
    for row in sorted(rows, key=_others_order):
        length = number(row["params"], "length")
        if length is not None and length > 0 and row["seconds"] > 0:
            title = ", ".join(f"{name} {value}" for name, value in _others(row))
            found.setdefault(title, {}).setdefault(impl_of(row), {})[length] = row["seconds"]
    return {
        panel: {impl: dict(sorted(curve.items())) for impl, curve in impls.items()}
        for panel, impls in found.items()
    }


def _others(row: Row) -> list[tuple[str, Any]]:
    """The parameters that are neither an axis nor a series of a plot."""
    return sorted((n, v) for n, v in row["params"].items() if n not in ("impl", "device", "length"))


def _others_order(row: Row) -> list[Any]:
    return [(name, order(value)) for name, value in _others(row)]


class Crossover(NamedTuple):
    """From `length` on (interpolated, between two measured lengths) `winner` is faster than `loser`."""

    length: float
    seconds: float
    winner: str
    loser: str
    between: tuple[float, float]
    leads: bool  # whether no third one is faster there: the fastest changes


def crossovers(panel: Mapping[str, Curve]) -> list[Crossover]:
    """Where one implementation of a panel overtakes another, by length."""
    found = []
    for one, other in combinations(panel, 2):
        thirds = [curve for name, curve in panel.items() if name not in (one, other)]
        for length, seconds, between, other_wins in flips(panel[one], panel[other]):
            leads = all(time_at(curve, length) >= seconds for curve in thirds)
            winner, loser = (other, one) if other_wins else (one, other)
            found.append(Crossover(length, seconds, winner, loser, between, leads))
    return sorted(found)


def time_at(curve: Curve, length: float) -> float:
    """The time at a length between two measured ones, on logarithmic axes; infinite outside of them."""
    for low, high in pairwise(sorted(curve)):
        if low <= length <= high:
            share = (math.log(length) - math.log(low)) / (math.log(high) - math.log(low))
            return _between(curve[low], curve[high], share)
    return math.inf


def flips(first: Curve, second: Curve) -> list[tuple[float, float, tuple[float, float], bool]]:
    """(length, seconds, the measured lengths around it, whether `second` is faster after it) for
    each change of order between two curves, interpolated on logarithmic axes.

    The order is looked at where both were measured and differ by 3% or more.
    """
    lengths = sorted(first.keys() & second.keys())
    gaps = [math.log(first[n]) - math.log(second[n]) for n in lengths]  # above 0: second is faster
    clear = [i for i, gap in enumerate(gaps) if abs(gap) >= CLEAR]
    found = []
    for before, after in pairwise(clear):
        if (gaps[before] > 0) == (gaps[after] > 0):
            continue
        k = next(k for k in range(before, after) if (gaps[k + 1] > 0) != (gaps[before] > 0))
        share = gaps[k] / (gaps[k] - gaps[k + 1])
        around = lengths[k], lengths[k + 1]
        times = first[lengths[k]], first[lengths[k + 1]]
        found.append((_between(*around, share), _between(*times, share), around, gaps[after] > 0))
    return found


def _between(low: float, high: float, share: float) -> float:
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


class Point(NamedTuple):
    """A costed benchmark on a roofline: FLOP per byte of least traffic, and FLOP/s."""

    intensity: float
    rate: float
    dtype: str
    row: Row


def points(rows: Iterable[Row]) -> list[Point]:
    """The rows that state FLOPs and bytes."""
    found = []
    for row in rows:
        flops, memory = number(row["info"], "flops"), number(row["info"], "least_bytes")
        if flops and memory and min(flops, memory, row["seconds"]) > 0:
            dtype = str(row["info"].get("dtype", ""))
            found.append(Point(flops / memory, flops / row["seconds"], dtype, row))
    return [point for point in found if math.isfinite(point.rate) and math.isfinite(point.intensity)]


class Roof(NamedTuple):
    """The ceilings of a device: bytes/s, and FLOP/s by dtype."""

    bandwidth: float
    matrix: dict[str, float]

    def at(self, intensity: float, dtype: str) -> float:
        """The most FLOP/s that this many FLOP per byte can reach."""
        return min(intensity * self.bandwidth, self.matrix.get(dtype, math.inf))

    def share(self, point: Point) -> float:
        """How much of what is possible at its intensity a point reaches."""
        return point.rate / self.at(point.intensity, point.dtype)


def roof(runs: Iterable[Run], side: Side) -> Roof | None:
    """The highest ceilings that the runs of this machine measured; None where none did."""
    bandwidth, matrix = 0.0, dict[str, float]()
    for run in runs:
        if run.machine != side.machine:
            continue
        measured = _mapping(_mapping(run.facts.get("ceilings")).get(side.device))
        speeds = [number(measured, name) or 0.0 for name in ("copy_bytes_per_s", "read_bytes_per_s")]
        bandwidth = max(bandwidth, *speeds)
        rates = _mapping(measured.get("matrix_flop_per_s"))
        for dtype in rates:
            matrix[dtype] = max(matrix.get(dtype, 0.0), number(rates, dtype) or 0.0)
    return Roof(bandwidth, {dtype: rate for dtype, rate in matrix.items() if rate > 0}) if bandwidth else None


def differences(first: Row, second: Row) -> list[str]:
    """What both state about their work (dtype, shapes, cost), and state differently."""
    one, other = first["info"], second["info"]
    return [name for name in WORK if name in one and name in other and one[name] != other[name]]


class Pair(NamedTuple):
    """A benchmark on two devices; ratio: the first's time over the second's, None where the work differs."""

    first: Row
    second: Row
    ratio: float | None


def pairs(first: Iterable[Row], second: Iterable[Row]) -> list[Pair]:
    """The benchmarks that were run on both sides, with the same implementation and parameters."""
    others = {key_of(row, "device"): row for row in second}
    found = []
    for row in first:
        other = others.get(key_of(row, "device"))
        if other:
            fair = not differences(row, other) and row["seconds"] > 0 and other["seconds"] > 0
            found.append(Pair(row, other, row["seconds"] / other["seconds"] if fair else None))
    return found


def history(runs: Iterable[Run]) -> dict[Key, list[tuple[int, Row]]]:
    """Each benchmark's rows with the number of their run, oldest first."""
    found: dict[Key, list[tuple[int, Row]]] = {}
    for number_of_run, run in enumerate(runs):
        for row in run.rows:
            found.setdefault(key_of(row), []).append((number_of_run, row))
    return found


class Trend(NamedTuple):
    """Times relative to the first run, by the number of the run: of each benchmark of an
    implementation, and their geometric mean over those that all its runs have ({} without any).
    """

    each: list[dict[int, float]]
    mean: dict[int, float]


def trends(runs: Iterable[Run]) -> dict[tuple[str, str], dict[str, Trend]]:
    """By benchmark function and device, then implementation. What was run once has no trend."""
    lines: dict[tuple[str, str], dict[str, list[dict[int, float]]]] = {}
    for seen in history(runs).values():
        times = {n: row["seconds"] for n, row in seen if row["seconds"] > 0}
        if len(times) > 1:
            row, first = seen[0][1], times[min(times)]
            panel = lines.setdefault((function_of(row), device_of(row)), {})
            panel.setdefault(impl_of(row), []).append({n: t / first for n, t in times.items()})
    return {
        panel: {impl: Trend(each, _mean(each)) for impl, each in impls.items()}
        for panel, impls in lines.items()
    }


def _mean(each: list[dict[int, float]]) -> dict[int, float]:
    numbers = sorted({n for line in each for n in line})
    whole = [line for line in each if len(line) == len(numbers)]
    if not whole:
        return {}
    return {n: math.exp(sum(math.log(line[n]) for line in whole) / len(whole)) for n in numbers}
