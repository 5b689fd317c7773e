"""The report: what its tables, plots and page must never get wrong.

The results are made here: two machines, several lengths, several runs.
"""

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perf_lab.cli import main, renewed
from perf_lab.measure import plots, report, runs, tables

from .checkout import ROOT, in_checkout

LENGTHS = (128, 512, 2048, 8192)
CPU = {"name": "epyc", "device": "cpu", "device_name": "EPYC", "bandwidth": 5e10, "matrix": {"float32": 2e11}}
GPU = {
    "name": "h200",
    "device": "cuda",
    "device_name": "H200",
    "bandwidth": 4e12,
    "matrix": {"float32": 5e13, "bfloat16": 7e14},
}
# start-up in seconds and share of the ceiling, by benchmark and implementation
SOFTMAX = {"eager": (2e-6, 0.3), "compiled": (9e-6, 0.6), "triton": (2e-5, 0.9)}
ATTENTION = {"naive": (5e-6, 0.05), "sdpa": (5e-5, 0.7)}


def benchmark(machine, name, impl, length, seconds, flops, memory, **params):
    """An entry of a results file as the bench suite saves it."""
    device, of = machine["device"], machine["matrix"]
    floor = max(memory / machine["bandwidth"], flops / of["float32"])
    ids = "-".join(str(value) for value in (*params.values(), length, device, impl))
    return {
        "name": f"test_{name}_speed[{ids}]",
        "fullname": f"bench/test_{name}_speed.py::test_{name}_speed[{ids}]",
        "params": {**params, "length": length, "device": device, "impl": impl},
        "extra_info": {
            "device": device,
            "device_name": machine["device_name"],
            "impl": impl,
            "reference": "eager" if name == "softmax" else "naive",
            "dtype": "float32",
            "flops": flops,
            "least_bytes": memory,
            "fraction_of_ceiling": floor / seconds,
            "ratio": 2.0,
            "rows": 64,
        },
        "stats": {"median": seconds},
    }


def content(machine, day=1, slowdown=1.0):
    """A results file: softmax and causal and full attention on a machine, on a day of March."""
    found = []
    for length in LENGTHS:
        for impl, (start, share) in SOFTMAX.items():
            flops, memory = 5 * 512 * length, 8 * 512 * length
            seconds = slowdown * (start + memory / machine["bandwidth"] / share)
            found.append(benchmark(machine, "softmax", impl, length, seconds, flops, memory))
        for causal in (False, True):
            for impl, (start, share) in ATTENTION.items():
                flops, memory = 4 * 8 * 64 * length**2 // (1 + causal), 4 * 4 * 8 * 64 * length
                floor = max(flops / machine["matrix"]["float32"], memory / machine["bandwidth"])
                seconds = slowdown * (start + floor / share)
                if seconds < 0.05:
                    found.append(
                        benchmark(machine, "attention", impl, length, seconds, flops, memory, causal=causal)
                    )
    ceilings = {"read_bytes_per_s": machine["bandwidth"], "matrix_flop_per_s": machine["matrix"]}
    facts = {
        "name": machine["name"],
        "devices": {machine["device"]: machine["device_name"]},
        "torch": "2.13.0",
        "ceilings": {machine["device"]: ceilings},
    }
    return {
        "machine_info": {"node": machine["name"], "perf_lab": facts},
        "commit_info": {"id": f"{day:02d}" * 20, "dirty": False},
        "datetime": f"2026-03-{day:02d}T12:00:00+00:00",
        "benchmarks": found,
    }


def save(folder, machine, day=1, slowdown=1.0, change=lambda content: None):
    """Write a results file into the machine's folder, after `change` had its way with the content."""
    made = content(machine, day, slowdown)
    change(made)
    path = folder / machine["name"] / f"{day:04d}_run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made))
    return path


def one_run(machine=CPU, **how):
    """The parsed run of a results file that was never written."""
    made = content(machine, **how)
    rows = tables.rows_in(made, Path("made.json"))
    facts = made["machine_info"]["perf_lab"]
    return runs.Run(Path("made/made.json"), machine["name"], facts, None, "abc", rows)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A folder with three runs of one machine and one of another."""
    folder = tmp_path_factory.mktemp("history")
    for day, slowdown in ((1, 1.0), (5, 1.1), (9, 0.5)):
        save(folder, CPU, day, slowdown)
    save(folder, GPU, 3)
    return folder


@pytest.fixture(scope="module")
def page(history):
    """The page of that folder."""
    return report.page(runs.load_runs([history]))


class Reader(HTMLParser):
    """What a reader of the page meets: tags with their attributes, tables by caption, text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.tables, self.text, self.at, self.caption = [], {}, "", "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.at = tag if tag in ("caption", "th", "td") else self.at
        if tag == "table":
            self.lines = []
        elif tag == "tr":
            self.lines.append([])
        elif tag == "caption":
            self.caption = ""
        elif tag in ("th", "td"):
            self.lines[-1].append("")

    def handle_endtag(self, tag):
        self.at = "" if tag in ("caption", "th", "td") else self.at
        if tag == "table":
            self.tables[self.caption] = self.lines

    def handle_data(self, data):
        self.text += data
        if self.at == "caption":
            self.caption += data
        elif self.at:
            self.lines[-1][-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


# curves: where one overtakes another


@st.composite
def monotone_curves(draw, count=2):
    """`count` rising curves over the same lengths."""
    lengths = sorted(draw(st.sets(st.integers(1, 10**6), min_size=2, max_size=8)))
    steps = st.lists(st.floats(1.001, 30), min_size=len(lengths), max_size=len(lengths))
    made = []
    for _ in range(count):
        seconds = draw(st.floats(1e-7, 1e-3))
        made.append({n: (seconds := seconds * step) for n, step in zip(lengths, draw(steps), strict=True)})
    return made


def clear_order(first, second):
    """(length, which is faster) where the two differ by more than 3%."""
    apart = {n: math.log(first[n] / second[n]) for n in first}
    return [(n, gap > 0) for n, gap in apart.items() if abs(gap) > runs.CLEAR * (1 + 1e-9)]


@given(curves=monotone_curves())
def test_a_crossover_lies_between_the_lengths_where_the_order_flips(curves):
    first, second = curves
    flipped = [
        (low, high, wins)
        for (low, was), (high, wins) in zip(clear_order(*curves), clear_order(*curves)[1:], strict=False)
        if was != wins
    ]
    found = runs.flips(first, second)
    assert len(found) == len(flipped)
    for (length, seconds, _, second_wins), (low, high, wins) in zip(found, flipped, strict=True):
        assert low * (1 - 1e-9) <= length <= high * (1 + 1e-9)
        assert first[low] * (1 - 1e-9) <= seconds <= first[high] * (1 + 1e-9)
        assert second_wins == wins


@given(curves=monotone_curves(), closeness=st.floats(1, 5))
def test_curves_whose_order_never_flips_have_no_crossover(curves, closeness):
    (curve, other) = curves
    slower = {n: max(curve[n], other[n]) * closeness for n in curve}
    assert runs.flips(curve, slower) == runs.flips(slower, curve) == []


@given(ties=st.lists(st.floats(0.975, 1.025), max_size=6), factor=st.floats(1.1, 10))
def test_curves_within_three_percent_have_no_order(ties, factor):
    first = {n: float(n) for n in range(1, len(ties) + 3)}
    ratios = [factor, *ties, 1 / factor]
    second = {n: n * ratio for n, ratio in zip(first, ratios, strict=True)}
    ((length, _, (low, high), second_wins),) = runs.flips(first, second)  # one, however the ties go
    assert second_wins
    assert high == low + 1
    assert low <= length * (1 + 1e-9) and length <= high * (1 + 1e-9)
    inner = {n: second[n] for n in list(first)[1:-1]}
    assert runs.flips(first, inner) == []


@given(at=st.integers(20, 5000), powers=st.tuples(st.floats(0, 1), st.floats(1.5, 3)))
def test_power_laws_cross_exactly_where_they_do(at, powers):
    slow, fast = ({n: (n / at) ** power for n in (10, 100, 1000, 10000)} for power in powers)
    assume(abs(math.log10(at) - round(math.log10(at))) > 0.05)
    ((length, seconds, _, first_wins_later),) = runs.flips(fast, slow)
    assert length == pytest.approx(at)
    assert seconds == pytest.approx(1)
    assert first_wins_later


@given(curves=monotone_curves())
def test_swapping_two_curves_swaps_the_winner_alone(curves):
    one, other = runs.flips(*curves), runs.flips(*reversed(curves))
    assert [found[3] for found in one] == [not found[3] for found in other]
    assert [found[0] for found in one] == pytest.approx([found[0] for found in other])


@given(curves=monotone_curves(count=3))
def test_a_crossover_that_leads_has_nothing_below_it(curves):
    panel = dict(zip("abc", curves, strict=True))
    for cross in runs.crossovers(panel):
        (third,) = set("abc") - {cross.winner, cross.loser}
        assert cross.leads == (runs.time_at(panel[third], cross.length) >= cross.seconds)


@given(heights=st.lists(st.floats(0, 100), min_size=1, max_size=12), gap=st.floats(0.5, 30))
def test_labels_keep_their_order_and_their_distance(heights, gap):
    places = plots.spread(heights, gap, -10, 110)
    gap = min(gap, 120 / max(1, len(heights) - 1))
    inside = [place for _, place in sorted(zip(heights, places, strict=True))]
    assert all(-10 - 1e-9 <= place <= 110 + 1e-9 for place in places)
    assert all(b - a >= gap * (1 - 1e-9) for a, b in zip(sorted(places), sorted(places)[1:], strict=False))
    assert inside == sorted(inside) or len(set(heights)) < len(heights)


# rooflines, ratios, runs


@given(flops=st.integers(1, 10**15), memory=st.integers(1, 10**12), fraction=st.floats(1e-6, 1))
def test_no_point_is_above_its_roof(flops, memory, fraction):
    seconds = max(memory / GPU["bandwidth"], flops / GPU["matrix"]["float32"]) / fraction
    entry = benchmark(GPU, "softmax", "eager", 64, seconds, flops, memory)
    made = {**content(GPU), "benchmarks": [entry]}
    run = runs.Run(
        Path("r.json"), "h200", made["machine_info"]["perf_lab"], None, "", tables.rows_in(made, Path())
    )
    (point,), roof = runs.points(run.rows), runs.roof([run], runs.Side("h200", "cuda"))
    assert point.rate <= roof.at(point.intensity, point.dtype) * (1 + 1e-9)
    assert roof.share(point) == pytest.approx(fraction)


@given(factor=st.floats(0.01, 100))
def test_a_ratio_above_one_says_that_the_second_device_is_faster(factor):
    pairs = runs.pairs(one_run(CPU).rows, one_run(CPU, slowdown=1 / factor).rows)
    assert len(pairs) > len(SOFTMAX) * len(LENGTHS)
    assert [pair.ratio for pair in pairs] == pytest.approx([factor] * len(pairs))


@pytest.mark.parametrize("field", ["dtype", "shapes", "flops", "least_bytes"])
def test_different_work_has_no_ratio(field):
    first, second = one_run(CPU).rows, one_run(CPU).rows
    first[0]["info"][field], second[0]["info"][field] = "this", "that"
    ratios = [pair.ratio for pair in runs.pairs(first, second)]
    assert ratios[0] is None
    assert None not in ratios[1:]


@given(slowdowns=st.lists(st.floats(0.1, 10), min_size=2, max_size=5))
def test_history_is_relative_to_the_first_run(slowdowns):
    past = [one_run(CPU, slowdown=slowdown) for slowdown in slowdowns]
    trend = runs.trends(past)["test_softmax_speed", "cpu"]["triton"]
    expected = {n: slowdown / slowdowns[0] for n, slowdown in enumerate(slowdowns)}
    assert trend.mean == pytest.approx(expected)
    assert all(line == pytest.approx(expected) for line in trend.each)


@given(order=st.permutations([(1, 1.0), (5, 2.0), (9, 4.0)]))
def test_the_newest_result_is_shown_in_whatever_order_files_come(tmp_path_factory, order):
    folder = tmp_path_factory.mktemp("order")
    paths = [save(folder, CPU, day, slowdown) for day, slowdown in order]
    loaded = runs.load_runs([*paths, folder])  # the folder names each of them again
    assert [run.when.day for run in loaded] == [1, 5, 9]
    assert runs.newest(loaded)["epyc"][0]["seconds"] == one_run(CPU, slowdown=4.0).rows[0]["seconds"]


def test_the_sessions_of_ab_are_no_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = save(Path(".benchmarks"), CPU)
    save(Path(".benchmarks/ab/1a2b"), CPU, 2)
    assert runs.default_runs() == [run]
    assert [run.path for run in runs.load_runs([Path(".benchmarks")])] == [run]


# what is printed and written


def test_markdown_has_a_table_a_benchmark_and_says_where_the_fastest_changes(history):
    text = report.markdown(runs.load_runs([history]))
    assert "## epyc\n\n**softmax, EPYC, float32**\n\n| length | eager | compiled | triton |" in text
    assert text.count("**softmax, ") == text.count(": rows**") == 4  # with the table of `rows`, two machines
    low, high = re.search(r"sdpa overtakes naive at length \d+ \(between (\d+) and (\d+)\)", text).groups()
    assert {int(low), int(high)} < set(LENGTHS)


def cell(reader, caption, line, column):
    """A number from a table, by what its line and column are called."""
    header, *lines = reader.tables[caption]
    return next(row for row in lines if row[: len(line)] == line)[header.index(column)]


def test_a_number_in_a_table_of_the_page_is_the_saved_one(page):
    newest = tables.seconds_text(0.5 * (2e-5 + 8 * 512 * 2048 / 5e10 / 0.9))
    assert cell(Reader(page), "softmax, EPYC, float32", ["2,048"], "triton").startswith(newest)


def test_the_fastest_of_a_line_is_bold(history, page):
    fastest = [
        tables.seconds_text(min(grid.rows[place, impl]["seconds"] for impl in measured))
        for sides in runs.by_function(runs.load_runs([history])).values()
        for _, rows in sorted(sides.items())
        for grid in tables.grids(rows)
        for place in grid.places
        if len(measured := [impl for impl in grid.impls if (place, impl) in grid.rows]) > 1
    ]
    assert re.findall(r'<td class="best">([^<]+?) <small>', page) == fastest


def test_the_page_needs_nothing_but_itself(page):
    reader = Reader(page)
    assert not reader.all("script") + reader.all("link") + reader.all("img") + reader.all("iframe")
    links = [value for _, tag in reader.tags for name, value in tag.items() if name in ("href", "xlink:href")]
    assert all(link.startswith("#") for link in links)
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert not any(name.startswith("on") for _, tag in reader.tags for name in tag)


def test_figures_and_tables_say_what_they_are(page):
    reader = Reader(page)
    ids = [tag["id"] for _, tag in reader.tags if "id" in tag]
    assert len(ids) == len(set(ids))
    assert len(reader.all("svg")) == len(reader.all("figure")) == len(reader.all("figcaption")) == 8
    assert all(svg["role"] == "img" and len(svg["aria-label"]) > 40 for svg in reader.all("svg"))
    assert len(reader.all("caption")) == len(reader.all("table"))
    targets = {link["href"].removeprefix("#") for link in reader.all("a")}
    assert targets == {section["id"] for section in reader.all("section")}


def test_every_colour_of_the_plots_has_one_for_dark_ground(page):
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]+)", page))
    assert used - {"#000000"} <= set(plots.DARK)
    assert "#000000" not in used


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [dict(zip(plots.DARK, plots.DARK, strict=True)), plots.DARK])
def test_text_in_every_colour_can_be_read_on_its_ground(colours):
    ground = luminance(colours[plots.GROUND])
    for name in (plots.INK, plots.FAINT, *plots.SERIES):
        low, high = sorted([ground, luminance(colours[name])])
        assert (high + 0.05) / (low + 0.05) >= 4.5, name  # WCAG 2.2, level AA


def test_the_same_runs_give_the_same_bytes(history, page, tmp_path):
    loaded = runs.load_runs([history])
    assert report.page(loaded) == page
    first, again = (report.write_pictures(tmp_path / name, loaded) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in first)
    assert report.stale_pictures(tmp_path / "a", loaded) == []


def test_pictures_of_other_results_are_stale(history, tmp_path):
    loaded = runs.load_runs([history])
    report.write_pictures(tmp_path, loaded)
    loaded[-1].rows[0]["seconds"] *= 2
    (tmp_path / "gone.svg").write_text("<svg/>")
    assert [text.partition(".svg")[0] for text in report.stale_pictures(tmp_path, loaded)] == [
        "devices-epyc-cpu-h200-cuda",
        "gone",
        "history-epyc",
        "roofline-epyc-cpu",
        "softmax-epyc-cpu",
    ]


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    r"$\frac{$ 100% \n",
    "_hidden | a | b",
    "{{ 7 * 7 }}{% x %}",
    "--> ]]> <!--",
    "bell\x07 escape\x1b[31m null\x00 lone\ud800",
    'id="x" href="#y" font-family: z',
    "",
    "名前 \U0001f680",
]


@pytest.mark.parametrize("place", ["impl", "function", "device_name", "dtype", "machine", "value"])
def test_names_are_data(tmp_path, place):
    def rename(content):
        content["benchmarks"] = content["benchmarks"][: len(SOFTMAX) * len(LENGTHS)]
        extra = [json.loads(json.dumps(b)) for b in content["benchmarks"][::3] for _ in HOSTILE]
        for b, name in zip(extra, HOSTILE * len(LENGTHS), strict=True):
            b["params"]["impl"] = b["extra_info"]["impl"] = name if place == "impl" else "eager"
            b["params"]["other"] = name if place == "value" else "1"
            b["extra_info"]["device_name"] = name if place == "device_name" else "EPYC"
            b["extra_info"]["dtype"] = name if place == "dtype" else "float32"
            b["fullname"] = f"bench/x.py::{name if place == 'function' else 'test_x'}[1]"
        content["benchmarks"] += extra
        content["machine_info"]["perf_lab"]["name"] = HOSTILE[0] if place == "machine" else "epyc"

    loaded = runs.load_runs([save(tmp_path, CPU, 1, change=rename), save(tmp_path, CPU, 2, change=rename)])
    text = report.page(loaded)
    reader = Reader(text)
    assert "<script" not in text
    assert all(
        ElementTree.fromstring(picture.file()) is not None for picture in report.pictures(loaded).values()
    )
    assert not reader.all("img")
    assert not [name for _, tag in reader.tags for name in tag if name.startswith("on")]
    assert "7 * 7" in reader.text or place in ("machine", "device_name", "dtype")
    ids = [tag["id"] for _, tag in reader.tags if "id" in tag]
    assert len(ids) == len(set(ids))
    markdown = report.markdown(loaded)
    assert not set("\x00\x07\x1b\ud800") & set(markdown + text)
    assert "<script" not in markdown


def test_a_file_of_an_old_version_has_blank_cells(tmp_path):
    def age(content):
        content["machine_info"] = {"node": "old"}
        for name in ("commit_info", "datetime"):
            del content[name]
        for b in content["benchmarks"]:
            del b["extra_info"]

    loaded = runs.load_runs([save(tmp_path, CPU, change=age)])
    reader = Reader(report.page(loaded))
    assert reader.tables["Machines"][1] == ["old", "", "", "", "", "", ""]
    assert cell(reader, "softmax, cpu", ["128"], "eager") == "37 us"
    assert "| 128 | 37 us | " in report.markdown(loaded)


@pytest.mark.parametrize(
    "fill", [None, "text", [], {}, True, 10**400, float("nan")], ids=lambda fill: str(fill)[:5]
)
def test_any_field_but_name_and_time_may_be_missing_or_odd(tmp_path, fill):
    def change(content):
        found = content["benchmarks"]
        fields = [*found[0]["extra_info"], *found[0]["params"]]
        for b, field in zip(found, fields, strict=False):
            b["params" if field in b["params"] else "extra_info"][field] = fill
        for b, part in zip(found[len(fields) :], ("params", "extra_info", "params"), strict=False):
            b[part] = fill
        content["machine_info"]["perf_lab"]["ceilings"]["cpu"]["read_bytes_per_s"] = fill
        content["commit_info"], content["datetime"] = fill, fill

    loaded = runs.load_runs([save(tmp_path, CPU, change=change)])
    assert "softmax" in report.page(loaded)
    assert "softmax" in report.markdown(loaded)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"benchmarks": 3}',
        '{"benchmarks": [3]}',
        '{"benchmarks": [{"fullname": "t"}]}',
        '{"benchmarks": [{"fullname": "t", "stats": {"median": NaN}}]}',
        '{"benchmarks": [{"stats": {"median": 1}}]}',
    ],
)
def test_a_file_without_results_is_one_line_and_exit_code_2(tmp_path, capsys, text):
    (tmp_path / "0001_bad.json").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "0001_bad.json: " in err


def test_no_results_at_all_say_where_they_were_looked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "bench/results" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path}: no results" in capsys.readouterr().err


def test_committed_results_come_before_autosaved_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    autosaved = save(Path(".benchmarks"), GPU)
    assert runs.default_runs() == [autosaved]
    committed = save(Path("bench/results"), CPU)
    assert runs.default_runs() == [committed]


def test_without_the_extra_the_page_says_how_to_get_it(history, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert main(["report", str(history), "--html", str(tmp_path / "page.html")]) == 2
    assert "needs matplotlib and jinja2: pip install 'perf-lab[plot]'" in capsys.readouterr().err
    assert main(["report", str(history)]) == 0  # the tables need neither


def test_the_tables_are_made_without_matplotlib_and_jinja(history, monkeypatch):
    for name in ("matplotlib", "jinja2", "perf_lab.measure.plots"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an error
    spec = importlib.util.find_spec("perf_lab.measure.report")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert "softmax" in fresh.report([history])


# the real thing


def chromium(*options):
    """Run a headless browser in a profile of its own; gives what it prints."""
    names = ("chromium", "chromium-browser", "google-chrome")
    binary = next(filter(None, map(shutil.which, names)), None)
    if binary is None:
        pytest.skip(f"no browser here (looked for {', '.join(names)})")
    quiet = "--disable-quic --no-first-run --disable-background-networking --disable-component-update"
    command = [
        binary,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-sync",
        *quiet.split(),
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def pixels(path):
    """The colours of a picture and how many pixels have each."""
    import numpy
    from matplotlib.image import imread

    values = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    return dict(
        zip(*((v.tolist()) for v in numpy.unique(values @ [65536, 256, 1], return_counts=True)), strict=True)
    )


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_a_browser_shows_the_plots_and_the_tables(tmp_path, history, ground):
    assert main(["report", str(history), "--html", str(tmp_path / "page.html")]) == 0
    shot, dark = tmp_path / "page.png", ground == "dark"
    chromium(
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={shot}",
        "--window-size=1200,6000",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        (tmp_path / "page.html").as_uri(),
    )
    seen = pixels(shot)
    drawn = [*list(plots.SERIES)[:3], plots.INK, plots.GROUND]
    other = [plots.DARK[colour] for colour in drawn]
    shown, hidden = (other, drawn) if dark else (drawn, other)
    many = {colour: seen.get(int(colour[1:], 16), 0) > 100 for colour in shown + hidden}
    assert many == dict.fromkeys(shown, True) | dict.fromkeys(hidden, False)


def test_a_browser_reads_the_number_from_the_table(tmp_path, history, page):
    (tmp_path / "page.html").write_text(page)
    dom = chromium(f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "page.html").as_uri())
    reader = Reader(dom)
    sizes = [float(svg[side].removesuffix("pt")) for svg in reader.all("svg") for side in ("width", "height")]
    assert len(sizes) == 16
    assert min(sizes) > 50
    assert cell(reader, "softmax, EPYC, float32", ["128"], "eager").startswith("18.5 us")


@in_checkout
def test_readme_shows_the_committed_results():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert renewed(readme, ROOT) == readme, "stale: python -m perf_lab tables --write README.md"


@in_checkout
def test_committed_pictures_show_the_committed_results():
    folder = ROOT / "bench" / "results"
    if not list(folder.glob("*.svg")):
        pytest.skip("no pictures are committed")
    stale = report.stale_pictures(folder, runs.load_runs(sorted(folder.glob("*/*.json"))))
    assert stale == [], "python -m perf_lab report bench/results --pictures bench/results"
