"""The `bench` fixture, and pytest-benchmark fitted to devices: its clock, files and tables.

Loaded by a conftest beside `perf_lab.pytest_plugin`.
"""

import datetime
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perf_lab import machine
from perf_lab.measure import results
from perf_lab.measure.bench import Bench, Record
from perf_lab.measure.ceilings import ceilings, share
from perf_lab.measure.clock import elapsed
from perf_lab.measure.tables import text_tables
from perf_lab.pytest_plugin import devices

LONGEST_S = 40.0

_state = pytest.StashKey["RunState"]()


class RunState:
    """What one benchmark session has measured, and where it is written as it comes in."""

    def __init__(self, config: pytest.Config) -> None:
        session = config._benchmarksession  # type: ignore[attr-defined]
        session.storage.default_machine_id = session.machine_id = machine.slug()
        self.session = session
        self.records: list[Record] = []
        self.started = time.monotonic()
        self.done = self.total = 0
        self.folder = Path(session.storage.path) / machine.slug()
        self.left_over = results.leftovers(self.folder)
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        self.unfinished = self.folder / f"{results.UNFINISHED}{stamp}-{os.getpid()}.json"
        self.commit_info: Any = None

    def save_so_far(self, config: pytest.Config) -> None:
        """Write every finished benchmark of a run that asked for saving."""
        if not (self.session.save or self.session.autosave or self.session.json):
            return
        hook = config.hook
        if self.commit_info is None:
            self.commit_info = hook.pytest_benchmark_generate_commit_info(config=config)
        content = hook.pytest_benchmark_generate_json(
            config=config,
            benchmarks=self.session.benchmarks,
            include_data=self.session.save_data,
            machine_info=self.session.get_machine_info(),
            commit_info=self.commit_info,
        )
        results.write_atomically(self.unfinished, content)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The one option of the bench suite."""
    parser.getgroup("perf_lab").addoption(
        "--longest",
        type=float,
        default=LONGEST_S,
        metavar="SECONDS",
        help="skip, with its estimate, a benchmark whose one call would take longer (default: %(default)s)",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Results of this machine go to a folder of its own."""
    config.stash[_state] = RunState(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Benchmarks take their statistics from the clock that devices advance."""
    for item in items:
        if "bench" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=elapsed))


def _is_timed(item: pytest.Item) -> bool:
    return "bench" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("skip")


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Before measuring: the ceilings, and what an earlier run left behind."""
    state = config.stash[_state]
    state.total = sum(map(_is_timed, items))
    state.started = time.monotonic()
    lines = [f"an earlier run was killed; what it had finished is in {path}" for path in state.left_over]
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and state.total:
        reporter.showfspath = False  # each benchmark prints a line of its own
    if not state.total or state.session.disabled or config.option.collectonly:
        return lines
    return lines + [f"ceilings measured on {_measured(device)}" for device in devices(*machine.devices())]


def _measured(device: str) -> str:
    ceilings(device).measure()
    return str(ceilings(device))


@pytest.fixture
def bench(request: pytest.FixtureRequest, benchmark: Any) -> Iterator[Bench]:
    """A `Bench` for this test. The test has parameters device, impl and length."""
    config = request.config
    state = config.stash[_state]
    benchmark.params = {
        name: getattr(value, "name", value) for name, value in (benchmark.params or {}).items()
    }
    yield Bench(benchmark, state.records, config.getoption("longest"))
    if benchmark.has_error:
        state.session.benchmarks[:] = [b for b in state.session.benchmarks if b.fixture is not benchmark]
    elif benchmark.stats:
        state.save_so_far(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A line for each benchmark as it ends, with what is left."""
    report = yield
    report.perf_lab_line = "bench" in getattr(item, "fixturenames", ())  # type: ignore[attr-defined]
    if report.when == "call" and _is_timed(item):
        state = item.config.stash[_state]
        state.done += 1
        reporter = item.config.pluginmanager.get_plugin("terminalreporter")
        if reporter and reporter.verbosity >= 0:
            reporter.ensure_newline()
            reporter.write_line(_progress(state, item, report))
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """No dots between the lines of benchmarks."""
    ended = report.when == "call" or report.skipped
    if getattr(report, "perf_lab_line", False) and ended and not report.failed:
        return report.outcome, "", ""
    return None


def _progress(state: RunState, item: pytest.Item, report: pytest.TestReport) -> str:
    passed = time.monotonic() - state.started
    left = passed / state.done * (state.total - state.done)
    where = f"[{state.done}/{state.total}, {passed:.0f} s, about {left:.0f} s left]"
    return f"{where} {item.name}: {_outcome(state, item, report)}"


def _outcome(state: RunState, item: pytest.Item, report: pytest.TestReport) -> str:
    if report.skipped:
        return (
            f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
            if isinstance(report.longrepr, tuple)
            else "skipped"
        )
    if report.failed:
        return "FAILED"
    record = next((r for r in state.records if r.benchmark.fullname == item.nodeid), None)
    return f"{record.seconds * 1e3:.4g} ms" if record else report.outcome


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """What results are only comparable within; the host's name is nobody's business."""
    machine_info["node"] = machine.slug()
    machine_info["perf_lab"] = results.machine_info()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The tables: one a benchmark and device, ratios against the reference of this run."""
    state = config.stash[_state]
    if state.records:
        terminalreporter.section(
            "perf_lab: medians, ratio to the reference in this run, fraction of the ceiling"
        )
        rows = [
            {"name": r.benchmark.fullname, "params": r.benchmark.params, "info": r.info, "seconds": r.seconds}
            for r in state.records
        ]
        terminalreporter.write_line(text_tables(rows))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A run that came to its end has saved under its own name."""
    state = config.stash.get(_state, None)
    if state:
        share(machine.devices())
        state.unfinished.unlink(missing_ok=True)
