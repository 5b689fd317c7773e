"""`perf-lab ab`: what runs when, what a stopped run keeps, and that each side is what it says.

Most runs here are of sessions that are made up; the last are of pytest in a
repository of their own, whose benchmarks state their times (nothing sleeps).
"""

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_lab.cli import main
from perf_lab.measure.ab import Run, begin, carry_out, order
from perf_lab.measure.gate import DEFAULT, FASTER, NO_BASELINE, SAME, SLOWER, UNCLEAR, Policy
from perf_lab.measure.workshop import BASE, CONTROL, HEAD, KINDS, Plan, Variant, plan_for
from perf_lab.pytest_plugin import implementations

from .checkout import IMPORTS
from .mutants.ab import course


def plan(pairs=8, max_pairs=None):
    sides = Variant("one", "1" * 40), Variant("other", "2" * 40)
    return Plan(*sides, ("bench",), pairs=pairs, max_pairs=max_pairs or pairs)


class Machine:
    """Sessions that are made up: benchmark i takes i seconds, times its factor in sessions of a kind,
    times noise. Stops before session number `stop`.
    """

    def __init__(self, factors, spread=0.005, stop=math.inf, seed=0, benchmarks=6):
        self.factors, self.spread, self.stop, self.seed = factors, spread, stop, seed
        self.all = [f"b.py::test_x[{i:02}]" for i in range(1, benchmarks + 1)]
        self.calls = []

    def __call__(self, kind, pair, names):
        if len(self.calls) == self.stop:
            raise KeyboardInterrupt
        self.calls.append((kind, pair, tuple(names)))
        rng = np.random.default_rng([self.seed, pair, KINDS.index(kind)])
        noise = dict(zip(self.all, np.exp(rng.normal(0, self.spread, len(self.all))), strict=True))
        present = [name for name in names or self.all if self.factor(name, kind)]
        medians = {n: (1 + self.all.index(n)) * self.factor(n, kind) * noise[n] for n in present}
        return {"benchmarks": [{"fullname": n, "stats": {"median": t}} for n, t in medians.items()]}

    def factor(self, name, kind):
        return self.factors.get((self.all.index(name) + 1, kind), 1.0)


def carried_out(machine, planned=None, policy=DEFAULT, folder=None):
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(Path(folder or scratch), planned or plan(), seed=1)
        return carry_out(run, machine, policy, lambda line: None)


def verdicts(outcome):
    return [row.verdict for row in outcome.judged]


def test_the_first_pair_runs_all_and_further_pairs_only_what_is_open():
    machine = Machine({(2, HEAD): 1.2, (3, HEAD): 0.8})
    outcome = carried_out(machine)
    assert verdicts(outcome) == [SAME, SLOWER, FASTER, SAME, SAME, SAME]
    assert {names for _, pair, names in machine.calls if pair == 1} == {()}
    later = [names for _, pair, names in machine.calls if pair > 1]
    assert all({"b.py::test_x[02]", "b.py::test_x[03]"} <= set(names) for names in later)
    assert min(map(len, later)) == 2
    assert Counter(kind for kind, _, _ in machine.calls) == dict.fromkeys(KINDS, 8)


def test_a_suite_without_a_change_on_a_quiet_machine_is_done_after_few_pairs():
    machine = Machine({}, spread=0.003)
    assert set(verdicts(carried_out(machine))) == {SAME}
    assert max(pair for _, pair, _ in machine.calls) <= 3


@implementations(course)
@given(data=st.data(), pairs=st.integers(2, 8), more=st.integers(0, 4))
def test_what_moved_is_judged_only_at_the_looks(device, impl, data, pairs, more):
    """A verdict on the way would be one more chance for a false alarm."""
    made = impl(Policy(), pairs, pairs + more)
    machine = Machine(
        {(2, HEAD): data.draw(st.sampled_from([0.5, 1.5, 3.0]))}, seed=data.draw(st.integers(0, 99))
    )
    times = {kind: {name: [] for name in machine.all} for kind in KINDS}
    for pair in range(1, pairs + more + 1):
        for kind in KINDS:
            for row in machine(kind, pair, ())["benchmarks"]:
                times[kind][row["fullname"]].append(row["stats"]["median"])
        made.after(pair, {n: times[BASE][n] + times[CONTROL][n] for n in machine.all}, times[HEAD])
        moved = {timing.name for timing in made.decided.values() if timing.verdict in (SLOWER, FASTER)}
        assert not moved or pair >= pairs
        assert {*made.decided, *made.open} == {*machine.all}
    assert made.open == []


def test_the_looks_share_the_error_rate():
    one, two = (course["perf_lab"](Policy(), 4, most).policy.alarms for most in (4, 8))
    assert two == one / 2


def test_slowdowns_are_found_through_the_whole_course():
    """At a spread of 2%: 10% in 80 of 100 suites, 5% in 50; see test_gate for other spreads."""
    found = Counter()
    for seed in range(30):
        machine = Machine({(1, HEAD): 1.1, (2, HEAD): 1.05}, spread=0.02, seed=seed, benchmarks=20)
        ten, five, *_ = verdicts(carried_out(machine))
        found.update(ten=ten == SLOWER, five=five == SLOWER, same=ten == SAME)
    assert found["ten"] >= 29  # P(29 of 30 | 80%) is 1%
    assert found["five"] >= 21  # P(21 of 30 | 50%) is 2%
    assert found["same"] == 0


@given(seed=st.integers(0, 2**32))
def test_a_pair_holds_each_kind_once_in_an_order_of_its_own(seed):
    orders = [order(seed, pair) for pair in range(1, 65)]
    assert all(sorted(each) == sorted(KINDS) for each in orders)
    assert orders == [order(seed, pair) for pair in range(1, 65)]
    assert 10 <= sum(each.index(BASE) < each.index(HEAD) for each in orders) <= 54  # 5.5 deviations


@given(stop=st.integers(1, 23), again=st.integers(1, 23), seed=st.integers(0, 99))
def test_a_run_that_was_stopped_goes_on_where_it_stopped(stop, again, seed):
    factors = {(2, HEAD): 1.2}
    whole = Machine(factors, seed=seed)
    expected = carried_out(whole)
    calls = []
    with tempfile.TemporaryDirectory() as folder:
        for limit in (stop, again, math.inf):
            machine = Machine(factors, seed=seed, stop=limit)
            try:
                outcome = carried_out(machine, folder=folder)
            except KeyboardInterrupt:
                outcome = None
            calls += machine.calls
            if outcome:
                break
    assert calls == whole.calls  # no session twice, none left out
    assert verdicts(outcome) == verdicts(expected)
    assert [row.p for row in outcome.judged] == [row.p for row in expected.judged]


def test_a_control_that_alarms_leaves_nothing_with_a_verdict():
    outcome = carried_out(Machine({(2, CONTROL): 1.3, (3, HEAD): 1.5}))
    assert [timing.name for timing in outcome.alarms] == ["b.py::test_x[02]"]
    assert set(verdicts(outcome)) == {UNCLEAR}
    assert outcome.judged[0].note == "the A/A control alarmed"


def test_the_floor_is_what_the_control_differs_by():
    outcome = carried_out(Machine({(2, HEAD): 1.05}, spread=0.08))
    assert outcome.spread.typical > 0.04
    assert all(timing.floor == outcome.spread.typical for timing in outcome.judged if timing.verdict != SAME)


def test_what_one_side_lacks_has_no_baseline_and_is_not_run_again():
    machine = Machine({(1, BASE): None, (1, CONTROL): None, (2, HEAD): None, (3, HEAD): 1.5})
    assert verdicts(carried_out(machine))[:3] == [NO_BASELINE, NO_BASELINE, SLOWER]
    assert all(
        "b.py::test_x[01]" not in names and "b.py::test_x[02]" not in names for _, _, names in machine.calls
    )


def test_a_finished_run_is_not_continued_and_a_fresh_one_starts_anew(tmp_path):
    first = begin(tmp_path, plan())
    assert begin(tmp_path, plan()) == first
    assert begin(tmp_path, plan(pairs=3)).folder != first.folder
    assert begin(tmp_path, plan(), fresh=True).folder != first.folder
    newest = begin(tmp_path, plan())
    newest.finished.touch()
    assert begin(tmp_path, plan()) == first


BENCH = """
import os, random
import pytest

SECONDS = {"eager": 1.0, "quick": 0.5}

class Clock:
    now = 0.0
    def __call__(self):
        return self.now

clock = Clock()
pace = random.Random(os.urandom(8)).gauss(1, 5e-4)  # of this process

@pytest.mark.parametrize("impl", SECONDS)
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.benchmark(timer=clock)
def test_nap_speed(benchmark, impl, length):
    def nap():
        clock.now += SECONDS[impl] * length * pace
    benchmark.extra_info["flops"] = 10 * length
    benchmark.pedantic(nap, rounds=3)
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a bench suite, checked in; the working directory of the test."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "test_nap_speed.py").write_text(BENCH)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p pytest_benchmark.plugin\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # sessions start in a quarter of the time
    monkeypatch.setenv("PYTHONPATH", IMPORTS)
    git("init", "--quiet", ".")
    git("add", "--all")
    git("commit", "--quiet", "--message", "one")
    return tmp_path


def git(*arguments):
    name = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    return subprocess.run(["git", *name, *arguments], check=True, capture_output=True, text=True).stdout


def rewrite(repository, before, after):
    path = repository / "bench" / "test_nap_speed.py"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_a_slowdown_that_is_not_committed_is_found_and_nothing_is_left_behind(repository, capsys):
    rewrite(repository, '"eager": 1.0', '"eager": 1.5')
    rewrite(repository, "[1, 2]", "[1, 3]")
    before = git("status", "--porcelain"), git("log", "--all", "--oneline"), git("stash", "list")
    assert main(["ab", "HEAD", "--pairs", "2", "-k", "eager", "bench", "--summary", "out.md"]) == 1
    shown = capsys.readouterr().out
    assert "slower       test_nap_speed[1-eager]" in shown
    assert "no baseline  test_nap_speed[2-eager]" in shown
    assert "no baseline  test_nap_speed[3-eager]" in shown
    assert "quick" not in shown
    assert "| slower | test_nap_speed[1-eager] |" in (repository / "out.md").read_text()
    (repository / "out.md").unlink()
    assert (
        git("status", "--porcelain", "--", "bench"),
        git("log", "--all", "--oneline"),
        git("stash", "list"),
    ) == before
    assert git("worktree", "list").count("\n") == 1
    (run,) = (repository / ".benchmarks" / "ab").glob("*/")
    assert main(["gate", str(run / "base"), str(run / "head"), "--new-ok"]) == 1
    compared = [Path(sys.executable).parent / "pytest-benchmark", "compare", *sorted(run.glob("*/*.json"))]
    assert subprocess.run(compared, capture_output=True).returncode == 0


def test_a_benchmark_that_fails_is_named_and_the_run_goes_on_when_it_is_mended(
    repository, capsys, monkeypatch
):
    commit_of = git("rev-parse", "HEAD").strip()
    rewrite(
        repository,
        "rounds=3)",
        "rounds=3)\n    assert (impl, length) != ('quick', 2) or os.environ.get('MENDED')",
    )
    assert main(["ab", commit_of, "--pairs", "1"]) == 2
    complaint = capsys.readouterr().err
    assert "pair 1, head (the working tree): pytest gave exit code 1" in complaint
    assert "FAILED bench/test_nap_speed.py::test_nap_speed[2-quick]" in complaint
    monkeypatch.setenv("MENDED", "1")
    assert main(["ab", commit_of, "--pairs", "1"]) == 0
    assert len(list((repository / ".benchmarks" / "ab").glob("*/plan"))) == 1


def test_a_run_killed_in_a_session_goes_on_and_leaves_no_worktree(repository):
    rewrite(repository, "    def nap():", "    __import__('time').sleep(0.5)\n    def nap():")
    command = [sys.executable, "-m", "perf_lab", "ab", "HEAD", "--pairs", "1"]
    kept = lambda: list(repository.glob(".benchmarks/ab/*/*/*.json"))  # noqa: E731
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (kept() and list(repository.glob(".benchmarks/ab/*/running"))):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    stamps = {path: path.stat().st_mtime_ns for path in kept()}
    assert main(["ab", "HEAD", "--pairs", "1"]) == 0
    assert len(kept()) == 3
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert git("worktree", "list").count("\n") == 1


def test_one_implementation_against_another(repository, capsys):
    assert main(["ab", "nap:eager=quick", "--pairs", "2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"faster +test_nap_speed\[length=1\] .* -50\.0% ", shown), shown


def test_one_interpreter_against_another(repository, capsys):
    assert main(["ab", sys.executable, "--pairs", "1", "-k", "1-quick"]) == 0
    assert re.search(r"test_nap_speed\[1-quick\] .* 2 / 1\b", capsys.readouterr().out)


def test_a_run_of_nothing_has_no_verdict(repository, capsys):
    assert main(["ab", "HEAD", "-k", "no_such_benchmark"]) == 2
    assert "nothing was compared" in capsys.readouterr().err


def test_a_base_without_the_benchmarks_is_no_baseline(repository, capsys):
    first = git("rev-parse", "HEAD").strip()
    (repository / "bench" / "test_nap_speed.py").rename(repository / "bench" / "test_sleep_speed.py")
    assert main(["ab", first, "bench/test_sleep_speed.py", "--pairs", "1"]) == 3
    assert "4 no baseline of 4 benchmarks" in capsys.readouterr().out


def test_the_installed_perf_lab_must_be_another_than_the_checkout(repository, capsys, monkeypatch):
    (repository / "perf_lab").mkdir()
    (repository / "perf_lab" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(repository))
    assert main(["ab", "installed"]) == 2
    assert "not the perf_lab of that side: it imports" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-branch"], "BASE: got 'no-such-branch', accepted are a git revision, 'installed'"),
        (["eager=eager"], "BASE: got 'eager=eager', accepted are IMPL_A=IMPL_B"),
        (["HEAD", "no/such.py"], "PATH: got 'no/such.py', there is no no/such.py here"),
        (["HEAD", "--pairs", "0"], "--pairs: got 0"),
        (["HEAD", "--pairs", "4", "--max-pairs", "3"], "--pairs: got 4, at most 3"),
    ],
)
def test_what_cannot_be_run_says_why(repository, capsys, arguments, message):
    assert main(["ab", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_snapshot_is_the_working_tree_with_what_git_does_not_know_yet(repository):
    assert plan_for("HEAD").head.commit == git("rev-parse", "HEAD").strip()
    (repository / "new.py").write_text("new")
    (repository / ".gitignore").write_text("ignored.py")
    (repository / "ignored.py").write_text("ignored")
    (repository / ".benchmarks").mkdir()
    (repository / ".benchmarks" / "x.json").write_text("{}")
    made = plan_for("HEAD").head.commit
    assert made == plan_for("HEAD").head.commit
    assert set(git("ls-tree", "-r", "--name-only", made).split()) == {
        ".gitignore", "bench/test_nap_speed.py", "new.py", "pytest.ini",
    }  # fmt: skip
    assert "new.py" in git("ls-files", "--others")
