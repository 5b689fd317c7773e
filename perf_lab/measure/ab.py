"""`perf-lab ab`: base and head in fresh processes, side by side on this machine.

A pair is three sessions in random order: the base, the base once more (the
A/A control) and the head. The first pair runs every benchmark; a further one
only what is still open, which is what moved or cannot yet be called the same.
What moved is judged when it has all its pairs, not on the way there: each
look at the data would be a chance of its own for a false alarm.

The control's sessions are sessions of the base, and count as such. What they
differ by is the floor of the effect, and when the control alarms the machine
is not steady: then nothing has a verdict.

Each session's file is kept as it comes in, so that a killed run goes on where
it stopped.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from perf_lab.measure import results
from perf_lab.measure.gate import (
    FASTER,
    NO_BASELINE,
    SAME,
    SLOWER,
    Judged,
    Policy,
    Spread,
    Times,
    Timing,
    exit_code,
    judge,
    judge_costs,
    spread,
)
from perf_lab.measure.sides import Side, overrule, policy_from, refuse_others
from perf_lab.measure.verdicts import report
from perf_lab.measure.workshop import BASE, CONTROL, HEAD, KINDS, BrokenRunError, Plan, Workshop

HOME = Path(".benchmarks/ab")

Session = Callable[[str, int, Sequence[str]], dict[str, Any]]
"""(kind, pair, full names or () for all) -> what the session's results file holds"""


class Course:
    """What is decided after each pair.

    `decided` holds the verdicts, `open` the benchmarks that go on. One that is
    the same is done at once; one that moved at the looks, which are after
    `pairs`, and after `max_pairs` if those are more. The looks share the error rate.
    """

    def __init__(self, policy: Policy, pairs: int, max_pairs: int) -> None:
        self.looks = sorted({pairs, max_pairs})
        self.policy = dataclasses.replace(policy, alarms=policy.alarms / len(self.looks))
        self.decided: dict[str, Timing] = {}
        self.open: list[str] = []
        self.spread = Spread()
        self.family = 0

    def after(self, pair: int, base: Times, head: Times) -> None:
        """Decide on what the sessions up to this pair show; those of `base` are the control's too."""
        self.family = self.family or len({*base} & {*head})
        self.spread = spread(base, head)
        final = {SAME, NO_BASELINE, *((SLOWER, FASTER) if pair in self.looks else ())}
        base, head = (
            {name: side[name] for name in side if name not in self.decided} for side in (base, head)
        )
        judged = judge(base, head, self.policy, self.spread, self.family)
        last = pair == self.looks[-1]
        self.decided |= {timing.name: timing for timing in judged if last or timing.verdict in final}
        self.open = [timing.name for timing in judged if timing.name not in self.decided]


def order(seed: int, pair: int) -> list[str]:
    """The order of a pair's sessions."""
    return random.Random(f"{seed}/{pair}").sample(KINDS, len(KINDS))


@dataclass(frozen=True)
class Run:
    """A run's folder: plan and seed in `plan`, the file of each session in base/, ctrl/ and head/,
    what pytest printed in log/, and `finished` when the run came to its end.
    """

    folder: Path
    plan: Plan
    seed: int

    def path(self, kind: str, pair: int) -> Path:
        """Where a session is kept."""
        return self.folder / kind / f"{pair:04}_{kind}.json"

    def side(self, *kinds: str, upto: int) -> Side:
        """The sessions of these kinds in the pairs so far."""
        side = Side()
        for pair in range(1, upto + 1):
            for kind in kinds:
                path = self.path(kind, pair)
                side.add(path, results.load(path), ("impl",) if self.plan.base.impl else ())
        return side

    @property
    def finished(self) -> Path:
        """The mark of a run that came to its end."""
        return self.folder / "finished"

    @property
    def there(self) -> int:
        """How many sessions are kept."""
        return sum(1 for kind in KINDS for _ in (self.folder / kind).glob("*.json"))


def begin(home: Path, plan: Plan, *, fresh: bool = False) -> Run:
    """The newest run of this plan that did not come to its end; without one, or afresh, a new one."""
    text = json.dumps(plan.as_dict())
    for file in [] if fresh else sorted(home.glob("*/plan"), reverse=True):
        stored = json.loads(file.read_text(encoding="utf-8"))
        run = Run(file.parent, plan, stored["seed"])
        if json.dumps(stored["plan"]) == text and not run.finished.exists():
            return run
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    run = Run(home / name, plan, secrets.randbits(32))
    results.write_atomically(run.folder / "plan", {"seed": run.seed, "plan": plan.as_dict()})
    return run


@dataclass
class Outcome:
    """What a run came to. alarms: benchmarks of the A/A control that moved."""

    judged: list[Judged]
    spread: Spread
    alarms: list[Timing] = field(default_factory=list)


def carry_out(run: Run, session: Session, policy: Policy, say: Callable[[str], None]) -> Outcome:
    """Run what the run still lacks, pair by pair, and judge it."""
    course = Course(policy, run.plan.pairs, run.plan.max_pairs)
    progress = Progress(say, len(KINDS) * run.plan.max_pairs)
    names: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for pair in range(1, run.plan.max_pairs + 1):
        for kind in order(run.seed, pair):
            if not run.path(kind, pair).exists():
                with progress.session(pair, kind, len(names[kind])):
                    content = session(kind, pair, names[kind])
                results.write_atomically(run.path(kind, pair), content)
            progress.done += 1
        base, head = run.side(BASE, CONTROL, upto=pair), run.side(HEAD, upto=pair)
        course.after(pair, base.times, head.times)
        if not course.open:
            break
        both = {BASE: base, CONTROL: base, HEAD: head}
        names = {kind: [side.names[name] for name in course.open] for kind, side in both.items()}
    return conclude(run, course, pair)


class Progress:
    """A line before each session: how many are done, how long the rest takes at the most, what runs."""

    def __init__(self, say: Callable[[str], None], most: int) -> None:
        self.say, self.most, self.done = say, most, 0
        self.took: list[float] = []

    @contextlib.contextmanager
    def session(self, pair: int, kind: str, count: int) -> Iterator[None]:
        """Around one session of `count` benchmarks, 0 being all. Later sessions run fewer, not more."""
        left = ""
        if recent := self.took[-len(KINDS) :]:
            left = f", at most {sum(recent) / len(recent) * (self.most - self.done):.0f} s left"
        what = f"{count} still open" if count else "every benchmark"
        self.say(f"[{self.done} of at most {self.most} sessions{left}] pair {pair}, {kind}: {what}")
        start = time.monotonic()
        yield
        self.took.append(time.monotonic() - start)


def conclude(run: Run, course: Course, pairs: int) -> Outcome:
    """The verdicts of a run with this many pairs, the control's among them.

    Raises BrokenRunError when there was no benchmark at all.
    """
    first, second, head = (run.side(kind, upto=pairs) for kind in KINDS)
    base = run.side(BASE, CONTROL, upto=pairs)
    if not base.times and not head.times:
        raise BrokenRunError("no benchmark on either side: nothing was compared")
    refuse_others(base, head)
    timings = sorted(course.decided.values(), key=lambda timing: timing.name)
    overrule(timings, base, head)
    control = judge(first.times, second.times, course.policy, course.spread, course.family)
    alarms = [timing for timing in control if timing.moved]
    for timing in timings if alarms else ():
        timing.overruled = "the A/A control alarmed"
    return Outcome([*timings, *judge_costs(base.costs, head.costs)], course.spread, alarms)


def ab(
    plan: Plan,
    say: Callable[[str], None],
    show: Callable[[str], None],
    *,
    fresh: bool = False,
    new_ok: bool = False,
    to: Path | None = None,
) -> int:
    """Carry a plan out and show its verdicts; gives the exit code. say: takes progress; to: a file
    for the table in Markdown.

    Raises BrokenRunError for a run that cannot decide; the same call then goes on with it.
    """
    policy = policy_from(Path("pyproject.toml"))
    with _terminable(), Workshop(HOME, say) as workshop:
        run = begin(HOME, plan, fresh=fresh)
        kept = f", {run.there} sessions are there already" if run.there else ""
        say(f"{plan.base.title} against {plan.head.title}: {run.folder}{kept}")
        workshop.lay(plan)
        outcome = carry_out(run, partial(workshop.session, run.folder), policy, say)
        run.finished.touch()
    for timing in outcome.alarms:
        show(f"A/A control: {timing.name} differs from itself by {math.expm1(timing.shift):+.1%}")
    code = 2 if outcome.alarms else exit_code(outcome.judged, new_ok=new_ok)
    report(outcome.judged, outcome.spread, policy, code, show, to)
    return code


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """A polite kill ends the session that runs, and cleans up."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
