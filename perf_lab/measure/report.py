"""Saved runs as Markdown, as one page of HTML, and as pictures.

The page holds everything it shows: no script, no network, no date of its own,
so that the same runs give the same bytes. Names in results are data, and are
escaped wherever they go. The page and the pictures need the extra `plot`.
"""

import dataclasses
import importlib.util
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perf_lab.measure import runs as saved
from perf_lab.measure.runs import Crossover, Curve, Pair, Point, Roof, Row, Run, Side
from perf_lab.measure.tables import (
    Grid,
    device_of,
    escaped,
    function_of,
    grids,
    impl_of,
    length_text,
    markdown_tables,
    name_of,
    number_text,
    readable,
    seconds_text,
)

if TYPE_CHECKING:
    from perf_lab.measure.plots import Picture

FLOOR = "Differences under 3% count as none."


class MissingExtraError(RuntimeError):
    """What was asked for needs packages of the extra `plot`; the message names them."""


class Cell(NamedTuple):
    """A table cell: its value, what stands beside it in small type, whether it is its line's best."""

    text: str
    note: str = ""
    best: bool = False


class Table(NamedTuple):
    """A table whose first `keys` columns name the line; `words`: the others hold no numbers."""

    caption: str
    header: list[str]
    keys: int
    lines: list[list[Cell]]
    words: bool = False


class Figure(NamedTuple):
    """A picture with its caption, what it shows as sentences, and further ones to unfold."""

    picture: "Picture"
    caption: str
    notes: Sequence[str] = ()
    more: Sequence[str] = ()


class Part(NamedTuple):
    """One device of one section: figure, main table, and tables to unfold."""

    title: str
    figure: Figure | None
    tables: list[Table]
    details: list[Table]
    remark: str = ""


class Section(NamedTuple):
    """A heading of the page."""

    title: str
    anchor: str
    text: str
    parts: list[Part]


def report(paths: Sequence[Path], html: Path | None = None, folder: Path | None = None) -> str:
    """The tables of these runs as Markdown; also writes the page to `html` and the pictures to `folder`.

    Raises ResultsError for files without results, MissingExtraError, and OSError where it cannot write.
    """
    runs = saved.load_runs(paths or saved.default_runs())
    if html:
        text = page(runs)
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(text, encoding="utf-8")
    if folder:
        write_pictures(folder, runs)
    return markdown(runs)


def markdown(runs: Sequence[Run]) -> str:
    """The newest result of every benchmark: a heading a machine, a table a benchmark and device,
    and where its implementations overtake each other.
    """
    blocks = []
    for machine, rows in sorted(saved.newest(runs).items()):
        blocks.append(f"## {escaped(machine)}")
        for grid in grids(rows):
            members = list(grid.rows.values())
            blocks.append(markdown_tables(members))
            leading, _ = overtakings(saved.curves(members))
            blocks += ["\n".join(f"- {escaped(sentence)}" for sentence in leading)] if leading else []
    return "\n\n".join(blocks)


def overtakings(panels: Mapping[str, Mapping[str, Curve]]) -> tuple[list[str], list[str]]:
    """Each crossover as a sentence that names the interpolated length: those where the fastest
    changes, and those behind it.
    """
    leading: list[str] = []
    behind: list[str] = []
    for panel, curves in panels.items():
        for cross in saved.crossovers(curves):
            (leading if cross.leads else behind).append((f"{panel}: " if panel else "") + _sentence(cross))
    return leading, behind


def _sentence(cross: Crossover) -> str:
    low, high = (number_text(length) for length in cross.between)
    lead = ", and is the fastest from there" if cross.leads else ""
    at = length_text(cross.length)
    return f"{cross.winner} overtakes {cross.loser} at length {at} (between {low} and {high}){lead}"


def page(runs: Sequence[Run]) -> str:
    """The whole report as HTML. Raises MissingExtraError without matplotlib or jinja2."""
    _need("report --html")
    import jinja2

    from perf_lab.measure.plots import dark_rules

    loader = jinja2.PackageLoader("perf_lab.measure")
    # autoescape for every template: names are data
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        sections=_sections(runs), machines=_machines(runs), runs=_runs(runs), dark=dark_rules()
    )


def pictures(runs: Sequence[Run]) -> dict[str, "Picture"]:
    """Every picture of the page by its name. Raises MissingExtraError without matplotlib or jinja2."""
    _need("report --pictures")
    figures = [part.figure for section in _sections(runs) for part in section.parts if part.figure]
    return {figure.picture.name: figure.picture for figure in figures}


def write_pictures(folder: Path, runs: Sequence[Run]) -> list[Path]:
    """Write each picture to `folder`/<name>.svg; gives the files."""
    found = {folder / f"{name}.svg": picture for name, picture in pictures(runs).items()}
    folder.mkdir(parents=True, exist_ok=True)
    for path, picture in found.items():
        path.write_text(picture.file(), encoding="utf-8")
    return list(found)


def stale_pictures(folder: Path, runs: Sequence[Run]) -> list[str]:
    """The pictures in `folder` that these runs do not give, with the reason. What they show is
    compared, not how it was drawn: another matplotlib makes none stale.
    """
    fresh = pictures(runs)
    found = []
    for path in sorted(folder.glob("*.svg")):
        if path.stem not in fresh:
            found.append(f"{path.name}: the results have no such picture")
        elif f'data-of="{fresh[path.stem].fingerprint}"' not in path.read_text(encoding="utf-8"):
            found.append(f"{path.name}: shows other numbers than the results")
    return found


def _need(what: str) -> None:
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"{what} needs {' and '.join(missing)}: pip install 'perf-lab[plot]'")


def _sections(runs: Sequence[Run]) -> list[Section]:
    functions = saved.by_function(runs)
    whole = (_rooflines(runs, functions), _devices(functions), _history(runs))
    found = [_benchmark(function, sides) for function, sides in functions.items()]
    return _with_own_names(found + [section for section in whole if section])


def _with_own_names(sections: Sequence[Section]) -> list[Section]:
    """The same with every anchor and picture's name used once."""
    taken = Counter[str]()

    def own(name: str) -> str:
        taken[name] += 1
        return name if taken[name] == 1 else own(f"{name}-{taken[name]}")

    found = []
    for section in sections:
        parts = []
        for part in section.parts:
            if figure := part.figure:
                picture = dataclasses.replace(figure.picture, name=own(figure.picture.name))
                part = part._replace(figure=figure._replace(picture=picture))
            parts.append(part)
        found.append(section._replace(anchor=own(section.anchor), parts=parts))
    return found


def _slug(*names: str) -> str:
    return "-".join(filter(None, (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names)))


def _side_name(side: Side, rows: Sequence[Row]) -> str:
    device = str(rows[0]["info"].get("device_name") or side.device)
    return f"{device} ({side.machine})" if _slug(device) != side.machine else device


def _benchmark(function: str, sides: Mapping[Side, list[Row]]) -> Section:
    impls = dict.fromkeys(impl_of(row) for rows in sides.values() for row in rows)
    looks = {impl: i for i, impl in enumerate(impls)}
    parts = []
    for side, rows in sorted(sides.items()):
        (grid,) = grids(rows)
        where = _side_name(side, rows)
        panels = {title: panel for title, panel in saved.curves(rows).items() if len(_lengths(panel)) > 1}
        figure = _times(name_of(function), side, where, panels, looks) if panels else None
        tables = [Table(title, lines[0], len(grid.names), _cells(lines)) for title, lines in grid.extras()]
        remark = "" if figure else "No curve: it was measured at fewer than two lengths."
        parts.append(Part(where, figure, [_grid_table(grid)], tables, remark))
    return Section(name_of(function), _slug("benchmark", function), "", parts)


def _lengths(panel: Mapping[str, Curve]) -> list[float]:
    return sorted({length for curve in panel.values() for length in curve})


def _times(
    name: str, side: Side, where: str, panels: Mapping[str, Mapping[str, Curve]], looks: Mapping[str, int]
) -> Figure:
    from perf_lab.measure import plots

    leading, behind = overtakings(panels)
    lengths = _lengths({f"{p} {i}": curve for p, panel in panels.items() for i, curve in panel.items()})
    impls = dict.fromkeys(impl or "time" for panel in panels.values() for impl in panel)
    caption = f"{name} on {where}: time per call against length, both axes logarithmic."
    alt = (
        f"{caption} Lengths {number_text(lengths[0])} to {number_text(lengths[-1])}; {', '.join(impls)}. "
        + "; ".join(leading or ["no implementation takes the lead from another"])
    )
    if len(impls) > 1:
        caption += f" A ring with a length: the fastest changes; a small ring: another order changes. {FLOOR}"
        leading = leading or ["No implementation takes the lead from another."]
    picture = plots.Picture(
        _slug(name, side.machine, side.device),
        alt,
        [panels, looks],
        lambda: plots.times(panels, looks),
    )
    return Figure(picture, caption, leading, behind)


def _grid_table(grid: Grid) -> Table:
    lines = []
    for place in grid.places:
        times = {impl: grid.rows[place, impl]["seconds"] for impl in grid.impls if (place, impl) in grid.rows}
        best = min(times.values()) if len(times) > 1 else None
        cells = [
            _split(grid.text(place, impl), best is not None and times.get(impl) == best)
            for impl in grid.impls
        ]
        lines.append([*(Cell(_parameter(value)) for value in place), *cells])
    return Table(grid.title, grid.lines()[0], len(grid.names), lines)


def _parameter(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return number_text(value)
    return "" if value is None else str(value)


def _split(text: str, best: bool = False) -> Cell:
    """A cell of `tables` in its two parts: the time, and what stands in brackets."""
    value, _, note = text.partition(" (")
    return Cell(value, note.removesuffix(")"), best)


def _cells(lines: Sequence[Sequence[str]]) -> list[list[Cell]]:
    return [[Cell(text) for text in line] for line in lines[1:]]


def _rooflines(runs: Sequence[Run], functions: Mapping[str, Mapping[Side, list[Row]]]) -> Section | None:
    parts = []
    for side in sorted({side for sides in functions.values() for side in sides}):
        rows = [row for sides in functions.values() for row in sides.get(side, [])]
        if points := saved.points(rows):
            parts.append(_roofline(side, _side_name(side, rows), points, saved.roof(runs, side)))
    text = "How close each benchmark with a stated cost comes to what the device can do."
    return Section("Roofline", "roofline", text, parts) if parts else None


def _roofline(side: Side, where: str, points: Sequence[Point], roof: Roof | None) -> Part:
    from perf_lab.measure import plots

    if roof is None:
        return Part(where, None, [], [], "No roof: these runs have no measured ceilings of this device.")
    named = [(name_of(function_of(point.row)), point) for point in points]
    caption = (
        f"{where}: FLOP/s against FLOP per byte of least traffic for {len(points)} benchmarks. "
        "Lines: the measured memory bandwidth and matrix rates."
    )
    name, best = max(named, key=lambda of: roof.share(of[1]))
    picture = plots.Picture(
        _slug("roofline", side.machine, side.device),
        f"Roofline. {caption} Closest to its roof: {name} {impl_of(best.row)}, {roof.share(best):.0%}.",
        [[(name, point[:3]) for name, point in named], roof],
        lambda: plots.roofline(named, roof),
    )
    return Part(where, Figure(picture, caption), [], [_points_table(where, points, roof)])


def _points_table(where: str, points: Iterable[Point], roof: Roof) -> Table:
    header = ["benchmark", "parameters", "implementation", "FLOP per byte", "TFLOP/s", "of its roof"]
    lines = []
    for point in points:
        values = [f"{point.intensity:.3g}", f"{point.rate / 1e12:.3g}", f"{roof.share(point):.0%}"]
        lines.append([*_who(point.row), *map(Cell, values)])
    return Table(f"Points of the roofline of {where}", header, 3, lines)


def _who(row: Row) -> list[Cell]:
    """Benchmark, parameters, implementation."""
    others = {name: value for name, value in row["params"].items() if name not in ("impl", "device")}
    ordered = sorted(others.items(), key=lambda item: (item[0] == "length", item[0]))
    text = ", ".join(f"{name} {_parameter(value)}" for name, value in ordered)
    return [Cell(name_of(function_of(row))), Cell(text), Cell(impl_of(row))]


def _devices(functions: Mapping[str, Mapping[Side, list[Row]]]) -> Section | None:
    sides = sorted({side for sides in functions.values() for side in sides})
    parts = []
    for one, other in combinations(sides, 2):
        first, second = (
            [row for sides in functions.values() for row in sides.get(side, [])] for side in (one, other)
        )
        if found := saved.pairs(first, second):
            parts.append(_beside((one, other), (_side_name(one, first), _side_name(other, second)), found))
    text = (
        "The same benchmark, implementation and parameters on two devices. Above 1 the second one is faster."
    )
    return Section("Device beside device", "devices", text, parts) if parts else None


def _beside(sides: tuple[Side, Side], names: tuple[str, str], found: list[Pair]) -> Part:
    from perf_lab.measure import plots

    lines: dict[str, list[float]] = {}
    for pair in found:
        if pair.ratio is not None:
            name = f"{name_of(function_of(pair.first))}, {impl_of(pair.first)}"
            lines.setdefault(name, []).append(pair.ratio)
    label = f"times faster on {names[1]} than on {names[0]}"
    title = f"{names[1]} beside {names[0]}"
    figure = None
    if lines:
        least, most = (of(ratio for ratios in lines.values() for ratio in ratios) for of in (min, max))
        caption = (
            f"{title}: ratio of the times, a dot for each length and set of parameters; logarithmic axis."
        )
        picture = plots.Picture(
            _slug("devices", *sides[0], *sides[1]),
            f"{caption} From {least:.3g}x to {most:.3g}x faster on {names[1]}.",
            [lines, label],
            lambda: plots.ratios(list(lines.items()), label),
        )
        figure = Figure(picture, caption)
    header = ["benchmark", "parameters", "implementation", *names, "ratio"]
    cells = [
        [*_who(p.first), *(Cell(seconds_text(row["seconds"])) for row in p[:2]), _ratio_cell(p)]
        for p in found
    ]
    return Part(title, figure, [], [Table(f"Times on {names[0]} and {names[1]}", header, 3, cells)])


def _ratio_cell(pair: Pair) -> Cell:
    if pair.ratio is not None:
        return Cell(f"{pair.ratio:.2f}x" if pair.ratio < 100 else f"{pair.ratio:,.0f}x")
    return Cell("", "other work: " + ", ".join(saved.differences(pair.first, pair.second)))


def _history(runs: Sequence[Run]) -> Section | None:
    parts = []
    for machine in sorted({run.machine for run in runs}):
        of_machine = [run for run in runs if run.machine == machine]
        trends = saved.trends(of_machine)
        if trends:
            parts.append(_past(machine, of_machine, trends))
    text = "Several runs of one machine, oldest first. Below 1 is faster than in the first run."
    return Section("History", "history", text, parts) if parts else None


def _past(
    machine: str, runs: Sequence[Run], trends: Mapping[tuple[str, str], Mapping[str, saved.Trend]]
) -> Part:
    from perf_lab.measure import plots

    panels = {", ".join(filter(None, (name_of(f), device))): impls for (f, device), impls in trends.items()}
    looks = {impl: i for impls in panels.values() for i, impl in enumerate(impls)}
    labels = [f"{run.when:%Y-%m-%d}\n{run.commit}" if run.when else run.path.stem[:12] for run in runs]
    caption = (
        f"{machine}: time over that of the first run, in {len(runs)} runs. Faint: each length and set of "
        "parameters; strong: their geometric mean."
    )
    ends = {
        f"{panel} {impl}": max(trend.mean.items())[1]
        for panel, impls in panels.items()
        for impl, trend in impls.items()
        if trend.mean
    }
    last = "; ".join(f"{name} {ratio:.2f}x" for name, ratio in ends.items())
    picture = plots.Picture(
        _slug("history", machine),
        f"{caption} In the last run: {last or 'no benchmark that all runs have'}.",
        [panels, labels],
        lambda: plots.history(panels, labels, looks),
    )
    return Part(machine, Figure(picture, caption), [], [_history_table(machine, runs)])


def _history_table(machine: str, runs: Sequence[Run]) -> Table:
    lines = []
    for seen in saved.history(runs).values():
        times = {n: row["seconds"] for n, row in seen}
        row = seen[0][1]
        device = Cell(device_of(row))
        cells = [Cell(seconds_text(times[n]) if n in times else "-") for n in range(len(runs))]
        lines.append([*_who(row), device, *cells])
    header = ["benchmark", "parameters", "implementation", "device", *(run.label for run in runs)]
    return Table(f"Median times on {machine}, run by run", header, 4, lines)


def _machines(runs: Sequence[Run]) -> Table:
    """What the newest run of each machine says about it; blank where it says nothing."""
    newest = {run.machine: run.facts for run in runs}
    header = ["machine", "devices", "cores", "torch", "triton", "CUDA", "driver"]
    lines = []
    for machine, facts in sorted(newest.items()):
        devices = facts.get("devices")
        names = ", ".join(f"{k}: {v}" for k, v in devices.items()) if isinstance(devices, dict) else ""
        rest = (facts.get(name) for name in ("cores", "torch", "triton", "cuda", "driver"))
        lines.append([Cell(machine), Cell(names), *(Cell("" if v is None else str(v)) for v in rest)])
    return Table("Machines", header, 1, lines, words=True)


def _runs(runs: Sequence[Run]) -> Table:
    lines = [
        [
            Cell(readable(f"{run.path.parent.name}/{run.path.name}")),
            Cell(run.machine),
            Cell("" if run.when is None else f"{run.when:%Y-%m-%d %H:%M} UTC"),
            Cell(run.commit),
            Cell(number_text(len(run.rows))),
        ]
        for run in runs
    ]
    return Table(
        "Runs, oldest first", ["file", "machine", "date", "commit", "benchmarks"], 1, lines, words=True
    )
