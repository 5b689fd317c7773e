"""Benchmarks as tables: one a benchmark and device, rows by length, columns by implementation.

A row in is {"name", "params", "info", "seconds"}: from a session, or from a saved file.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from perf_lab.measure import results

# extra_info that is context or already part of a cell; every other number gets a table of its own
STANDARD = {
    "ratio", "fraction_of_ceiling", "gb_per_s", "tflop_per_s", "flops", "least_bytes", "peak_bytes",
    "tokens",
}  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a saved file. Raises ResultsError, naming the file, when there are none in it."""
    return rows_in(results.load(path), path)


def rows_in(content: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The rows of what `path` held, `cleaned`. Fields that older files lack are empty; without a name
    and a median a benchmark is none, and ResultsError names it and the file.
    """
    return [
        _row(cleaned(entry), f"{path}: benchmark {count}")
        for count, entry in enumerate(content["benchmarks"], 1)
    ]


def cleaned(value: Any) -> Any:
    """The same JSON with every text in it `readable`."""
    if isinstance(value, dict):
        return {readable(name): cleaned(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [cleaned(inner) for inner in value]
    return readable(value) if isinstance(value, str) else value


def _row(entry: Any, where: str) -> dict[str, Any]:
    entry = _mapping(entry)
    name, seconds = entry.get("fullname") or entry.get("name"), number(_mapping(entry.get("stats")), "median")
    if not isinstance(name, str):
        raise results.ResultsError(f"{where} lacks 'fullname'")
    if seconds is None or seconds < 0:
        raise results.ResultsError(f"{where} ({name}) lacks a median time")
    params = {key: _plain(value) for key, value in _mapping(entry.get("params")).items()}
    return {"name": name, "params": params, "info": _mapping(entry.get("extra_info")), "seconds": seconds}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else json.dumps(value)


def number(info: dict[str, Any], name: str) -> float | None:
    """A finite number of this name, None for anything else."""
    value = info.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= sys.float_info.max else None


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: "24.8 us"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def number_text(value: float) -> str:
    """Whole numbers in full with thousands marked, others to three digits."""
    return f"{value:,}" if isinstance(value, int) or float(value).is_integer() else f"{value:.3g}"


def length_text(length: float) -> str:
    """An interpolated length: three digits are all that it is good for."""
    return number_text(round(float(f"{length:.3g}")) if length >= 10 else float(f"{length:.3g}"))


def cell(row: dict[str, Any]) -> str:
    """Time, ratio to the reference (above 1 is faster), fraction of the machine's ceiling."""
    info = row["info"]
    notes = []
    ratio, fraction = number(info, "ratio"), number(info, "fraction_of_ceiling")
    if ratio is not None and info.get("impl") != info.get("reference"):
        notes.append(f"{ratio:.2f}x")
    if fraction is not None:
        notes.append(f"{fraction:.0%}")
    return seconds_text(row["seconds"]) + (f" ({', '.join(notes)})" if notes else "")


@dataclass(frozen=True)
class Grid:
    """Rows in their places: one line for each combination of the parameters `names`, length last,
    one column for each implementation.
    """

    title: str
    names: list[str]
    impls: list[str]
    places: list[tuple[Any, ...]]
    rows: dict[tuple[tuple[Any, ...], str], dict[str, Any]]

    def text(self, place: tuple[Any, ...], impl: str, of: Callable[[dict[str, Any]], str] = cell) -> str:
        """One cell; "-" where nothing was measured."""
        row = self.rows.get((place, impl))
        return "-" if row is None else of(row)

    def lines(self, of: Callable[[dict[str, Any]], str] = cell) -> list[list[str]]:
        """All cells as text, the header first."""
        header = [*self.names, *(impl or "time" for impl in self.impls)]
        return [header] + [
            ["" if value is None else str(value) for value in place]
            + [self.text(place, i, of) for i in self.impls]
            for place in self.places
        ]

    def extras(self) -> list[tuple[str, list[list[str]]]]:
        """(title, lines) for each further number that the rows carry."""
        names: dict[str, None] = {}
        for row in self.rows.values():
            names.update(
                {k: None for k in row["info"] if number(row["info"], k) is not None and k not in STANDARD}
            )
        return [
            (f"{self.title}: {name.replace('_', ' ')}", self.lines(partial(_extra, name))) for name in names
        ]


def function_of(row: dict[str, Any]) -> str:
    """The benchmark's function: "test_softmax_speed"."""
    return row["name"].partition("[")[0].rpartition("::")[2]


def device_of(row: dict[str, Any]) -> str:
    """The device type, "" where a foreign file does not say."""
    return str(row["info"].get("device") or row["params"].get("device") or "")


def name_of(function: str) -> str:
    """What a benchmark function measures: "softmax"."""
    return re.sub(r"^test_|_speed$", "", function)


def grids(rows: Iterable[dict[str, Any]]) -> list[Grid]:
    """One for each benchmark and device."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((function_of(row), device_of(row)), []).append(row)
    return [_grid(_title(function, members), members) for (function, _), members in groups.items()]


def tables(rows: Iterable[dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """(title, lines of cells, the header first) for each benchmark and device."""
    return [table for grid in grids(rows) for table in [(grid.title, grid.lines()), *grid.extras()]]


def _title(function: str, members: list[dict[str, Any]]) -> str:
    info = members[0]["info"]
    dtypes = sorted({str(m["info"].get("dtype") or "") for m in members} - {""})
    device = info.get("device_name") or device_of(members[0])
    return ", ".join(part for part in (name_of(function), str(device), *dtypes) if part)


def _extra(name: str, row: dict[str, Any]) -> str:
    value = number(row["info"], name)
    return "" if value is None else number_text(value)


def impl_of(row: dict[str, Any]) -> str:
    """The implementation: a parameter, or "" where a foreign file has none."""
    return str(row["params"].get("impl", ""))


def order(value: Any) -> tuple[int, float, str]:
    """A sorting key for parameters: numbers, then words, then what is missing."""
    if value is None:
        return 2, 0.0, ""
    return (1, 0.0, value) if isinstance(value, str) else (0, value, "")


def _grid(title: str, members: list[dict[str, Any]]) -> Grid:
    names = sorted(
        {n for row in members for n in row["params"]} - {"impl", "device"}, key=lambda n: (n == "length", n)
    )
    rows = {(tuple(row["params"].get(n) for n in names), impl_of(row)): row for row in members}
    impls = list(dict.fromkeys(impl for _, impl in rows))
    places = sorted({place for place, _ in rows}, key=lambda place: [order(value) for value in place])
    return Grid(title, names, impls, places, rows)


def text_tables(rows: Iterable[dict[str, Any]]) -> str:
    """The tables for a terminal."""
    blocks = []
    for title, lines in tables(rows):
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        blocks.append(
            "\n".join(
                [title, *("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)]
            )
        )
    return "\n\n".join(blocks)


def markdown_tables(rows: Iterable[dict[str, Any]]) -> str:
    """The tables for a README."""
    blocks = []
    for title, lines in tables(rows):
        header, *body = ["| " + " | ".join(map(escaped, line)) + " |" for line in lines]
        blocks.append("\n".join([f"**{escaped(title)}**", "", header, "|" + "---:|" * len(lines[0]), *body]))
    return "\n\n".join(blocks)


def escaped(text: str) -> str:
    """Names are data: none may end a cell or open HTML."""
    return readable(text).replace("|", "\\|").replace("<", "&lt;")


def readable(name: str) -> str:
    """A name on one line, without the control characters that terminals obey and XML forbids."""
    return " ".join("".join(c if c.isprintable() else " " for c in name).split())
