"""The measuring side: what a benchmark must never get wrong.

Clocks run on fake devices here, and whole sessions in a folder of their own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perf_lab import machine
from perf_lab.measure import results
from perf_lab.measure.bench import COLD, MOST_COPIES, CeilingError, Record, add_cost, add_ratios, copies_for
from perf_lab.measure.ceilings import VARIABLE, Ceilings, cache_bytes, ceilings, share
from perf_lab.measure.clock import EventTimer, WallTimer
from perf_lab.measure.memory import peak_bytes
from perf_lab.measure.tables import markdown_tables, rows_of
from perf_lab.op import OPS, Cost, Op
from perf_lab.pytest_plugin import implementations

from .checkout import IMPORTS

RATES = {"float32": 1e18, "bfloat16": 1e18}  # FLOP/s, as far above any machine as the bandwidth


class FakeDevice:
    """A device with a queue: work takes no host time, waiting for it does."""

    def __init__(self) -> None:
        self.host = self.queued = self.device = 0.0

    def launch(self, seconds: float) -> None:
        self.queued += seconds

    def wait(self, device: str = "fake") -> None:
        self.host += self.queued
        self.device += self.queued
        self.queued = 0.0

    def now(self) -> float:
        return self.host

    def event(self) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self) -> None:
        self.at = self.device.device + self.device.queued

    def synchronize(self) -> None:
        self.device.wait()

    def elapsed_time(self, other: "FakeEvent") -> float:
        return (other.at - self.at) * 1e3


@given(busy=st.floats(0, 10), seconds=st.floats(1e-6, 10), calls=st.integers(1, 9), repeat=st.integers(1, 9))
def test_wall_time_is_that_of_the_work_alone(busy, seconds, calls, repeat):
    device = FakeDevice()
    device.launch(busy)  # what was queued before does not count
    timer = WallTimer([lambda: device.launch(seconds)] * calls, "fake", repeat, device.now, device.wait)
    assert timer.round() == pytest.approx(seconds, rel=1e-9, abs=1e-12)


timers = Op("timer")  # implementations: (calls, fake device) -> a Timer
timers.register("wall", devices=("cpu",))(
    lambda calls, fake: WallTimer(calls, "fake", 1, fake.now, fake.wait)
)
timers.register("events", devices=("cpu",))(lambda calls, fake: EventTimer(calls, fake.event))
del OPS[timers.name]


@implementations(timers)
@given(flush=st.floats(0, 10), seconds=st.floats(1e-6, 10), calls=st.integers(1, 9))
def test_what_was_queued_before_is_not_timed(device, impl, flush, seconds, calls):
    fake = FakeDevice()
    fake.launch(flush)
    timer = impl.fn([lambda: fake.launch(seconds)] * calls, fake)
    assert timer.round() == pytest.approx(seconds, rel=1e-6, abs=1e-9)


def test_a_clock_that_does_not_wait_would_be_caught():
    device = FakeDevice()
    timer = WallTimer([lambda: device.launch(1.0)], "fake", now=device.now, wait=lambda device: None)
    assert timer.round() == 0.0


@given(size=st.integers(1, 2**34))
def test_enough_copies_fill_three_caches(size):
    copies = copies_for(size, "cpu")
    assert copies >= 2
    assert copies * size >= COLD * cache_bytes("cpu") or copies == MOST_COPIES


class FakeBenchmark:
    """As much of pytest-benchmark's fixture as a record reads."""

    def __init__(self, seconds: float) -> None:
        self.name = "fake"
        self.stats = type("Metadata", (), {"stats": type("Stats", (), {"median": seconds})})


def record(impl: str, seconds: float, key: tuple[str, ...] = ("test",)) -> Record:
    return Record(FakeBenchmark(seconds), key, impl, "eager", {})


def fixed_ceilings(bandwidth: float, rate: float) -> Ceilings:
    found = Ceilings("cpu", copy=bandwidth, matrix={"float32": rate})
    found.measure_bandwidth = lambda: None  # type: ignore[method-assign]
    found.measure_rate = lambda dtype: None  # type: ignore[method-assign]
    return found


@given(memory=st.integers(1, 10**12), flops=st.integers(1, 10**15))
def test_fraction_is_the_floor_over_the_time(memory, flops):
    of = fixed_ceilings(bandwidth=1e9, rate=1e12)
    floor = max(memory / 1e9, flops / 1e12)
    measured = record("eager", 2 * floor)
    add_cost(measured, Cost(flops, memory), torch.float32, of)
    assert measured.info["fraction_of_ceiling"] == pytest.approx(0.5)
    assert measured.info["gb_per_s"] == pytest.approx(memory / (2 * floor) / 1e9)


def test_faster_than_the_ceiling_is_an_error():
    with pytest.raises(CeilingError, match="the measurement is wrong"):
        add_cost(record("eager", 0.5), Cost(1, 10**9), torch.float32, fixed_ceilings(1e9, 1e12))


def test_ceilings_are_measured_again_before_that_is_believed():
    of = fixed_ceilings(1e9, 1e12)
    of.measure_bandwidth = lambda: setattr(of, "copy", 4e9)  # type: ignore[method-assign]
    measured = record("eager", 0.5)
    add_cost(measured, Cost(1, 10**9), torch.float32, of)
    assert measured.info["fraction_of_ceiling"] == pytest.approx(0.5)


def test_a_ceiling_that_moves_allows_what_it_moves_and_no_more():
    of = fixed_ceilings(1e9, 1e12)
    of.seen = {"read": [0.8e9, 1e9]}  # as far as WIDEST
    add_cost(record("eager", 0.9), Cost(1, 10**9), torch.float32, of)
    with pytest.raises(CeilingError):
        add_cost(record("eager", 0.7), Cost(1, 10**9), torch.float32, of)
    of.seen = {"read": [0.1e9, 1e9]}
    with pytest.raises(CeilingError):
        add_cost(record("eager", 0.7), Cost(1, 10**9), torch.float32, of)


def test_ratio_is_against_the_reference_of_the_same_key():
    records = [record("triton", 1.0), record("eager", 3.0), record("eager", 9.0, ("other",))]
    add_ratios(records, ("test",))
    assert [r.info.get("ratio") for r in records] == [3.0, 1.0, None]


def test_peak_memory_counts_what_was_held_at_once():
    x = torch.zeros(2**18)  # 1 MiB
    scalars = 64  # bytes: the 1 becomes a tensor on its way
    assert 0 <= peak_bytes(lambda: x + 1, "cpu") - 2**20 <= scalars
    assert (
        0 <= peak_bytes(lambda: (x.double() + 1).float(), "cpu") - 4 * 2**20 <= scalars
    )  # 2 MiB twice, then 2 + 1


SESSION = """
import time
import pytest
from perf_lab.pytest_plugin import lengths, on_devices, timed
from perf_lab.softmax import softmax
from perf_lab.strategies import Input

{body}
"""

WORK = """
@pytest.mark.parametrize("impl", ["slow", "fast"])
@lengths({lengths})
@on_devices("cpu")
def test_nap_speed(bench, device, impl, length):
    nap = length / 1e3 / (1 + 9 * (impl == "fast"))
    work, verify = lambda: time.sleep(nap), lambda result: None
    bench.run(work, device=device, verify=verify, reference="slow", estimate=nap, rounds=3)
"""


CONFTEST = """
from perf_lab import machine

machine.interpret_without_gpu()
pytest_plugins = ["perf_lab.pytest_plugin", "perf_lab.measure.pytest_bench"]
"""


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A bench session of its own: gives run(body, *options) -> CompletedProcess, in a folder beside it."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --benchmark-group-by=func,param:length\n")
    monkeypatch.setenv("PYTHONPATH", IMPORTS)
    known = {"copy_bytes_per_s": 1e15, "read_bytes_per_s": 1e15, "matrix_flop_per_s": RATES}
    (tmp_path / "ceilings.json").write_text(json.dumps(dict.fromkeys(machine.DEVICES, known)))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ceilings.json"))  # measuring them is not what is tested

    def command(body: str, *options: str) -> list[str]:
        (tmp_path / "test_session_speed.py").write_text(SESSION.format(body=body))
        return [sys.executable, "-m", "pytest", "-ra", "test_session_speed.py", *options]

    def run(body: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(body, *options), cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    run.command = command
    run.folder = tmp_path
    return run


def saved(session) -> list[Path]:
    return sorted(session.folder.glob(".benchmarks/*/*.json"))


def test_a_session_saves_ratios_and_its_machine(session):
    done = session(WORK.format(lengths="20"), "--benchmark-autosave")
    assert done.returncode == 0, done.stdout
    (path,) = saved(session)
    content = results.load(path)
    ratios = {b["params"]["impl"]: b["extra_info"]["ratio"] for b in content["benchmarks"]}
    assert ratios["slow"] == 1.0
    assert ratios["fast"] > 3  # ten by construction; a busy machine may wake late
    assert {"name", "torch", "triton", "driver", "ceilings"} <= set(content["machine_info"]["perf_lab"])
    assert path.parent.name == content["machine_info"]["node"]


def test_what_would_take_too_long_is_a_visible_skip_with_its_estimate(session):
    done = session(WORK.format(lengths="20"), "--longest", "0.01")
    assert "1 passed, 1 skipped" in done.stdout
    assert "would take about 0.02 s here, above 0.01 s" in done.stdout


def test_length_replaces_the_lengths(session):
    done = session(WORK.format(lengths="20"), "--length", "3", "--collect-only", "-q")
    assert "[cpu-3-slow]" in done.stdout
    assert "[cpu-20-" not in done.stdout


WRONG = """
@softmax.register("wrong", devices=("cpu",))
def wrong(x):
    return 0 * x

@timed(softmax)
@lengths(64)
def test_softmax_speed(bench, device, impl, length):
    bench.op(impl, Input((64, length)), device=device)
"""


def test_a_wrong_implementation_is_not_timed_and_not_saved(session):
    done = session(WRONG, "--benchmark-autosave", "-k", "wrong or eager")
    assert done.returncode == 1
    assert "should be" in done.stdout
    assert [b["params"]["impl"] for b in results.load(saved(session)[0])["benchmarks"]] == ["eager"]


STALE = """
calls = []

@softmax.register("stale", devices=("cpu",))
def stale(x):
    calls.append(x.softmax(-1))
    return calls[0]  # right at first, the same thing ever after

@timed(softmax)
@lengths(64)
def test_softmax_speed(bench, device, impl, length):
    bench.op(impl, Input((64, length)), device=device)
"""


def test_an_output_that_goes_stale_while_timing_is_not_saved(session):
    done = session(STALE, "--benchmark-autosave", "-k", "stale")
    assert done.returncode == 1
    assert saved(session) == []


def test_a_killed_run_keeps_what_it_had_finished(session):
    body = WORK.format(lengths="1, 2, 60000")
    process = subprocess.Popen(
        session.command(body, "--benchmark-autosave", "--longest", "100"),
        cwd=session.folder,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (saved(session) and len(results.load(saved(session)[0])["benchmarks"]) == 4):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(results.load(saved(session)[0])["benchmarks"]) == 4
    again = session(WORK.format(lengths="1"))
    assert "an earlier run was killed; what it had finished is in" in again.stdout


@pytest.mark.parametrize("content", ["", " ", "{", "[]", "null", '{"benchmarks": 3}', "\x00\x01"])
def test_a_file_without_results_is_named(tmp_path, content):
    path = tmp_path / "0001_run.json"
    path.write_text(content)
    with pytest.raises(results.ResultsError, match="0001_run.json: "):
        results.load(path)


def test_two_machines_compare_side_by_side(session, tmp_path):
    """Also with what older files lack: BM4 of the public fault reports."""
    session(WORK.format(lengths="1, 2"), "--benchmark-autosave")
    (path,) = saved(session)
    content = results.load(path)
    for b in content["benchmarks"]:
        for field in ("name", "fullname", "param"):
            b[field] = b[field].replace("cpu", "cuda")
        b["params"]["device"] = "cuda"
        del b["stats"]["ops"]
    other = session.folder / ".benchmarks" / "another" / "0001_run.json"
    results.write_atomically(other, content)
    done = subprocess.run(
        [
            Path(sys.executable).parent / "pytest-benchmark",
            "compare",
            "--group-by=func,param:length",
            "--csv=out",
            path,
            other,
        ],
        cwd=session.folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    group = done.stdout.partition("length=2")[2]
    assert "cpu" in group
    assert "cuda" in group
    assert json.dumps(rows_of(other)[0]["params"]["device"]) == '"cuda"'


def test_tables_have_a_row_a_length_and_a_column_an_implementation():
    rows = [
        {
            "name": f"bench/test_x_speed.py::test_x_speed[{impl}-{length}]",
            "params": {"impl": impl, "length": length, "device": "cpu"},
            "info": {
                "impl": impl,
                "reference": "eager",
                "device": "cpu",
                "ratio": 2.0,
                "fraction_of_ceiling": 0.5,
            },
            "seconds": length * 1e-6,
        }
        for length in (512, 64)
        for impl in ("eager", "triton")
    ]
    text = markdown_tables(rows).splitlines()
    assert text[2] == "| length | eager | triton |"
    assert text[4] == "| 64 | 64 us (50%) | 64 us (2.00x, 50%) |"
    assert text[5].startswith("| 512 |")


def test_sessions_share_the_highest_ceilings(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ceilings.json"))
    ceilings.cache_clear()
    ceilings("cpu").copy, ceilings("cpu").read = 3e9, 2e9
    share(["cpu"])
    ceilings.cache_clear()
    assert ceilings("cpu").bandwidth == 3e9
    ceilings.cache_clear()
