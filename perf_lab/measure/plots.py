"""Pictures of results as SVG that is readable on light and on dark ground.

Drawn in the light colours; a style sheet of one rule a colour turns them into
the dark ones. Text stays text, names are never read as formulas or markup,
and the same numbers give the same bytes. Needs matplotlib (extra `plot`).
"""

import hashlib
import html
import io
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, NullLocator

from perf_lab.measure.runs import Crossover, Curve, Point, Roof, Trend, crossovers
from perf_lab.measure.tables import length_text, number_text, readable, seconds_text

GROUND, INK, FAINT, GRID = "#ffffff", "#1f2328", "#59636e", "#d8dee4"
# Okabe and Ito's hues, darkened until text in them has a contrast of 4.5 on white; beside each
# its counterpart of the same hue on dark ground. Marks differ too, for those who see no hue.
SERIES = {
    "#0072b2": "#56b4e9",
    "#b84a00": "#ff9e57",
    "#007a5a": "#35c99d",
    "#a34584": "#e8a0cc",
    "#786000": "#e6cf3c",
    "#4f5863": "#b1bac4",
    "#6b4fc0": "#b7a3ff",
}
DARK = {GROUND: "#0d1117", INK: "#e6edf3", FAINT: "#9da7b1", GRID: "#30363d", **SERIES}
MARKS = "osD^vPX"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "perf_lab",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the layout is the same everywhere
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.facecolor": GROUND,
    "figure.facecolor": GROUND,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}
LONGEST_NAME = 20
MOST_RINGS = 8  # of crossovers behind the fastest, a panel; more are listed only
LABEL_GAP = 12.0  # points between the baselines of two labels


@dataclass(frozen=True)
class Picture:
    """A figure before it is drawn: `data` is all that it shows, `alt` says it in words."""

    name: str
    alt: str
    data: Any
    draw: Callable[[], Figure]

    @property
    def fingerprint(self) -> str:
        """Of the data: two pictures with the same one show the same."""
        text = json.dumps([self.name, self.alt, self.data], default=str, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def inline(self) -> str:
        """An <svg> element for a page that holds `dark_rules`; its ids are its own."""
        return _in_tags(r'((?<= )id="|href="#|url\(#)', rf"\g<1>{self.name}-", self._svg())

    def file(self) -> str:
        """A file of its own, with the rules for dark ground in it."""
        head, rest = self._svg().split(">", 1)
        return f"{head}>\n<style>{dark_rules()}</style>{rest}\n"

    def _svg(self) -> str:
        out = io.StringIO()
        with matplotlib.rc_context(), warnings.catch_warnings():
            matplotlib.rcdefaults()  # a user's own style does not reach into a report
            matplotlib.rcParams.update(STYLE)
            warnings.filterwarnings("ignore", message="Glyph")  # the reader's fonts draw it, not ours
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.draw().savefig(out, format="svg", metadata=nothing)
        text = out.getvalue()
        text = text[text.index("<svg") :].strip()
        text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
        text = _in_tags(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
        alt = html.escape(readable(self.alt))
        attributes = f'<svg role="img" aria-label="{alt}" data-of="{self.fingerprint}" '
        return attributes + text.removeprefix("<svg ")


def _in_tags(pattern: str, replacement: str, text: str) -> str:
    """Replace within tags alone: what stands between them is somebody's name."""
    return re.sub(r"<[^<>]+>", lambda tag: re.sub(pattern, replacement, tag[0]), text)


def dark_rules() -> str:
    """The style sheet that redraws the light colours on dark ground. Its selectors name no
    ancestor: inside <use>, where the marks are, there is none to match.
    """
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme: dark){{{rules}}}"


def shown(name: str) -> str:
    """A name as a label of a series. matplotlib drops labels with a leading underscore."""
    return _cut(name, LONGEST_NAME).lstrip("_") or "time"


def _cut(text: str, longest: int) -> str:
    text = readable(text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def look(index: int) -> dict[str, Any]:
    """The colour and mark of the series of this number; dashed when the colours are used up."""
    colours = list(SERIES)
    return {
        "color": colours[index % len(colours)],
        "marker": MARKS[(index + index // len(colours)) % len(MARKS)],
        "linestyle": "-" if index < len(colours) else "--",
    }


def spread(
    wanted: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf
) -> list[float]:
    """Places at least `gap` apart from low to high, in the order of `wanted` and as near to it
    as that allows (least squares); closer together where there is no room for the gap.
    """
    count = len(wanted)
    gap = min(gap, (high - low) / max(1, count - 1))
    order = sorted(range(count), key=lambda i: wanted[i])
    # without the gaps below it, a place may be where the one before it is, or higher
    free = [
        min(max(wanted[i], low + n * gap), high - (count - 1 - n) * gap) - n * gap
        for n, i in enumerate(order)
    ]
    clusters: list[list[float]] = []
    for value in free:
        clusters.append([value])
        while len(clusters) > 1 and fmean(clusters[-2]) > fmean(clusters[-1]):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    settled = [fmean(cluster) for cluster in clusters for _ in cluster]
    places = {i: value + n * gap for n, (i, value) in enumerate(zip(order, settled, strict=True))}
    return [places[i] for i in range(count)]


def _panels(titles: Sequence[str], size: tuple[float, float], margins: tuple[float, float]) -> list[Axes]:
    """Axes of this size in inches in at most two columns, with these margins left and right."""
    (width, height), (left, right) = size, margins
    top, bottom = 0.35 if any(titles) else 0.1, 0.6
    columns = min(2, len(titles))
    lines = math.ceil(len(titles) / columns)
    across, down = left + width + right, top + height + bottom
    figure = Figure(figsize=(columns * across, lines * down))
    found = []
    for i, title in enumerate(titles):
        x, y = i % columns * across + left, (lines - 1 - i // columns) * down + bottom
        whole, high = columns * across, lines * down
        axes = figure.add_axes((x / whole, y / high, width / whole, height / high))
        axes.set_title(_cut(title, 64), loc="left", color=INK)
        axes.grid(True)
        axes.set_axisbelow(True)
        found.append(axes)
    return found


def _figure(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def _points(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Where these data lie on the figure, in points."""
    at = axes.transData.transform((x, y)) * 72 / _figure(axes).dpi
    return float(at[0]), float(at[1])


def _name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, dict[str, Any]]]) -> None:
    """Write each series' name beside its last point; those that end at the right edge outside of it."""
    scale = 72 / _figure(axes).dpi
    box = axes.get_window_extent()
    ground = {"facecolor": GROUND, "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    for x in dict.fromkeys(end[0] for end in ends):
        series = [end[1:] for end in ends if end[0] == x]
        heights = [_points(axes, x, y)[1] for y, _, _ in series]
        room = box.x1 * scale - _points(axes, x, 1)[0]
        at_edge = room < 40
        places = spread(heights, LABEL_GAP, box.y0 * scale, box.y1 * scale)
        for (y, name, style), height, place in zip(series, heights, places, strict=True):
            line = {
                "arrowstyle": "-",
                "relpos": (0, 0.5),
                "color": style["color"],
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 4,
            }
            axes.annotate(
                shown(name),
                (x, y),
                xytext=(room + 14 if at_edge else 8, place - height),
                textcoords="offset points",
                color=style["color"],
                va="center",
                arrowprops=line if at_edge else None,
                bbox=None if at_edge else ground,
                annotation_clip=False,
            )


def _length_axis(axes: Axes, lengths: Iterable[float]) -> None:
    """Ticks at the measured lengths: all, or the longest and every second, third, ... below it."""
    axes.set_xscale("log")
    lengths = sorted(set(lengths), reverse=True)
    axes.set_xlim(lengths[-1] / 1.25, lengths[0] * 1.25)
    every = next(n for n in range(1, len(lengths) + 1) if _have_room(axes, lengths[::n]))
    axes.xaxis.set_major_locator(FixedLocator(lengths[::every]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: number_text(round(n, 6))))
    axes.set_xlabel("length")


def _have_room(axes: Axes, lengths: Sequence[float]) -> bool:
    """Whether the labels of these ticks, the longest first, stand clear of each other."""
    half = [3.1 * len(number_text(n)) + 2 for n in lengths]
    middle = [_points(axes, n, 1)[0] for n in lengths]
    return all(middle[i] - half[i] >= middle[i + 1] + half[i + 1] for i in range(len(lengths) - 1))


def _time_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1.0,) if high / low > 200 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: seconds_text(seconds)))
    axes.set_ylabel("time per call")


def times(panels: Mapping[str, Mapping[str, Curve]], looks: Mapping[str, int]) -> Figure:
    """Time against length, a panel for each combination of the other parameters; a ring where
    one implementation overtakes another, with its length where the fastest one changes.
    """
    size = (5.6, 3.2) if len(panels) == 1 else (3.0, 2.6)
    axes = _panels(list(panels), size, (0.75, 1.75))
    for ax, panel in zip(axes, panels.values(), strict=True):
        for impl, curve in panel.items():
            ax.plot(list(curve), list(curve.values()), **look(looks[impl]))
        _time_axis(ax)
        _length_axis(ax, (n for curve in panel.values() for n in curve))
        _mark(ax, crossovers(panel))
        _name_ends(ax, [(*max(curve.items()), impl, look(looks[impl])) for impl, curve in panel.items()])
    return _figure(axes[0])


def _mark(axes: Axes, found: Sequence[Crossover]) -> None:
    """A ring at each crossover, a larger one with its length where the fastest changes."""
    ring: dict[str, Any] = {
        "markerfacecolor": "none",
        "markeredgecolor": INK,
        "markeredgewidth": 1.1,
        "zorder": 5,
    }
    box = {"facecolor": GROUND, "edgecolor": "none", "pad": 0.8, "alpha": 0.8}
    floor = axes.transAxes.transform((0, 0.14))[1]
    behind = [cross for cross in found if not cross.leads]
    for cross in [cross for cross in found if cross.leads] + (behind if len(behind) <= MOST_RINGS else []):
        at = (cross.length, cross.seconds)
        axes.plot(*at, "o", markersize=10 if cross.leads else 7, **ring)
        if cross.leads:
            above = axes.transData.transform(at)[1] < floor
            place: dict[str, Any] = {
                "xytext": (0, 9 if above else -9),
                "va": "bottom" if above else "top",
                "ha": "center",
            }
            axes.annotate(
                length_text(cross.length), at, textcoords="offset points", zorder=6, bbox=box, **place
            )


def roofline(points: Sequence[tuple[str, Point]], roof: Roof) -> Figure:
    """FLOP/s against FLOP per byte, a colour for each benchmark, below the measured ceilings."""
    (axes,) = _panels([""], (5.4, 3.6), (0.75, 1.95))
    axes.set_xscale("log")
    axes.set_yscale("log")
    reach = [p.intensity for _, p in points] + [rate / roof.bandwidth for rate in roof.matrix.values()]
    rates = [p.rate for _, p in points] + list(roof.matrix.values())
    axes.set_xlim(min(reach) / 3, max(reach) * 4)
    axes.set_ylim(min(rates) / 3, max(rates) * 3)
    names = list(dict.fromkeys(name for name, _ in points))
    for i, name in enumerate(names):
        at = [(p.intensity, p.rate) for n, p in points if n == name]
        style = look(i) | {"linestyle": "", "markeredgecolor": GROUND, "markeredgewidth": 0.5, "zorder": 4}
        axes.plot(*zip(*at, strict=True), **style)
    _roof_lines(axes, roof)
    for axis, label in ((axes.xaxis, "FLOP per byte of least traffic"), (axes.yaxis, "FLOP/s")):
        axis.set_major_locator(LogLocator(numticks=9))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(EngFormatter(sep=" "))
        axis.set_label_text(label)
    handles = [
        Line2D([], [], label=shown(name), **look(i) | {"linestyle": ""}) for i, name in enumerate(names)
    ]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(1.0, -0.02), frameon=False, handletextpad=0.2
    )
    return _figure(axes)


def _roof_lines(axes: Axes, roof: Roof) -> None:
    """The slope of the memory, and a level for each dtype's matrix rate."""
    (left, right), bottom = axes.get_xlim(), axes.get_ylim()[0]
    ridge = max(roof.matrix.values(), default=right * roof.bandwidth) / roof.bandwidth
    line: dict[str, Any] = {"color": FAINT, "linewidth": 1.2}
    axes.plot([left, ridge], [left * roof.bandwidth, ridge * roof.bandwidth], **line)
    seen = max(left, bottom / roof.bandwidth)  # where the slope enters the axes
    foot = seen * (ridge / seen) ** 0.06
    (x0, y0), (x1, y1) = (_points(axes, x, x * roof.bandwidth) for x in (foot, ridge))
    axes.annotate(
        f"memory {EngFormatter(unit='B/s', places=0)(roof.bandwidth)}",
        (foot, foot * roof.bandwidth),
        xytext=(-3, 4),
        textcoords="offset points",
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)),
        rotation_mode="anchor",
        color=FAINT,
    )
    levels = [_points(axes, right, rate)[1] for rate in roof.matrix.values()]
    for (dtype, rate), y, place in zip(roof.matrix.items(), levels, spread(levels, LABEL_GAP), strict=True):
        axes.plot([rate / roof.bandwidth, right], [rate, rate], **line)
        axes.annotate(
            f"{shown(dtype)} {EngFormatter(unit='FLOP/s', places=0)(rate)}",
            (right, rate),
            xytext=(4, place - y),
            textcoords="offset points",
            va="center",
            color=FAINT,
            annotation_clip=False,
        )


def history(
    panels: Mapping[str, Mapping[str, Trend]], labels: Sequence[str], looks: Mapping[str, int]
) -> Figure:
    """Time over that of the first run, a panel for each benchmark: faint lines for its lengths,
    a strong one for each implementation's geometric mean.
    """
    axes = _panels(list(panels), (3.0, 2.0), (0.75, 1.75))
    for ax, panel in zip(axes, panels.values(), strict=True):
        ends = []
        faint = max(0.06, min(0.35, 5 / sum(len(trend.each) for trend in panel.values())))
        for impl, trend in panel.items():
            style = look(looks[impl])
            for line in trend.each:
                ax.plot(
                    *zip(*sorted(line.items()), strict=True), color=style["color"], linewidth=0.8, alpha=faint
                )
            if trend.mean:
                ax.plot(*zip(*sorted(trend.mean.items()), strict=True), **style)
            ends.append((*max((trend.mean or trend.each[0]).items()), impl, style))
        ax.axhline(1, color=FAINT, linewidth=0.8, zorder=1)
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, 0.9), max(high, 1.1))  # noise must not look like news
        pad = 0.08 * (len(labels) - 1)
        ax.set_xlim(-pad, len(labels) - 1 + pad)
        step = math.ceil(len(labels) / 4)
        ax.xaxis.set_major_locator(FixedLocator(range(0, len(labels), step)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda i, _: labels[int(i)]))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3g}x"))
        ax.set_ylabel("time / first run")
        _name_ends(ax, ends)
    return _figure(axes[0])


def ratios(lines: Sequence[tuple[str, Sequence[float]]], label: str) -> Figure:
    """A line for each benchmark and implementation: its ratios over the lengths, least to most."""
    (axes,) = _panels([""], (4.6, 0.24 * len(lines) + 0.2), (2.9, 0.6))
    axes.set_xscale("log")
    for i, (_, found) in enumerate(lines):
        axes.plot([min(found), max(found)], [i, i], color=GRID, linewidth=3, solid_capstyle="round")
        axes.plot(found, [i] * len(found), linestyle="", marker="o", color=next(iter(SERIES)), markersize=4)
    axes.axvline(1, color=FAINT, linewidth=1)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.yaxis.set_major_locator(FixedLocator(range(len(lines))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda i, _: _cut(lines[int(i)][0], 38)))
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.8), max(high, 1.25))
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(
        LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0), numticks=12)
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.grid(False, axis="y")
    axes.set_xlabel(_cut(label, 80))
    return _figure(axes)
