"""Benchmarks as tables: one a benchmark and device, rows by length, columns by implementation.

A row in is {"name", "params", "info", "seconds"}: from a session, or from a saved file.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perf_lab.measure import results

# extra_info that is context or already part of a cell; every other number gets a table of its own
STANDARD = {
    "ratio", "fraction_of_ceiling", "gb_per_s", "tflop_per_s", "flops", "least_bytes", "peak_bytes",
}  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a saved file. Raises ResultsError, naming the file, when there are none in it."""
    try:
        return [
            {
                "name": b["fullname"],
                "params": b["params"] or {},
                "info": b["extra_info"],
                "seconds": b["stats"]["median"],
            }
            for b in results.load(path)["benchmarks"]
        ]
    except (KeyError, TypeError) as error:
        raise results.ResultsError(f"{path}: a benchmark in it lacks {error}") from error


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: "24.8 us"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def number_text(value: float) -> str:
    """Whole numbers in full with thousands marked, others to three digits."""
    return f"{value:,}" if isinstance(value, int) or float(value).is_integer() else f"{value:.3g}"


def cell(row: dict[str, Any]) -> str:
    """Time, ratio to the reference (above 1 is faster), fraction of the machine's ceiling."""
    info = row["info"]
    notes = []
    if "ratio" in info and info.get("impl") != info.get("reference"):
        notes.append(f"{info['ratio']:.2f}x")
    if "fraction_of_ceiling" in info:
        notes.append(f"{info['fraction_of_ceiling']:.0%}")
    return seconds_text(row["seconds"]) + (f" ({', '.join(notes)})" if notes else "")


def tables(rows: Iterable[dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """(title, lines of cells, the header first) for each benchmark and device."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        function = row["name"].rpartition("::")[2].partition("[")[0]
        groups.setdefault((function, row["info"].get("device", "")), []).append(row)
    found = []
    for (function, _), members in groups.items():
        title = _title(function, members)
        found.append((title, _grid(members, cell)))
        for name in _extras(members):
            found.append(
                (f"{title}: {name.replace('_', ' ')}", _grid(members, lambda row, n=name: _extra(row, n)))
            )
    return found


def _title(function: str, members: list[dict[str, Any]]) -> str:
    name = re.sub(r"^test_|_speed$", "", function)
    info = members[0]["info"]
    dtypes = sorted({m["info"].get("dtype", "") for m in members} - {""})
    return ", ".join(
        part for part in (name, info.get("device_name", info.get("device", "")), *dtypes) if part
    )


def _extras(members: list[dict[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for row in members:
        names.update(
            {k: None for k, v in row["info"].items() if isinstance(v, int | float) and k not in STANDARD}
        )
    return list(names)


def _extra(row: dict[str, Any], name: str) -> str:
    value = row["info"].get(name)
    return "" if value is None else number_text(value)


def _grid(members: list[dict[str, Any]], text: Any) -> list[list[str]]:
    impls = list(dict.fromkeys(str(row["params"].get("impl", "")) for row in members))
    names = sorted(
        {n for row in members for n in row["params"]} - {"impl", "device"}, key=lambda n: (n == "length", n)
    )
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in members:
        place = tuple(row["params"].get(name) for name in names)
        lines.setdefault(place, {})[str(row["params"].get("impl", ""))] = text(row)
    order = sorted(lines, key=lambda place: [(isinstance(v, str), v) for v in place])
    return [[*names, *impls]] + [
        [*map(str, place), *(lines[place].get(i, "-") for i in impls)] for place in order
    ]


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
        header, *body = ["| " + " | ".join(line) + " |" for line in lines]
        blocks.append("\n".join([f"**{title}**", "", header, "|" + "---:|" * len(lines[0]), *body]))
    return "\n\n".join(blocks)
