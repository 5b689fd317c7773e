"""Wrong timers."""

from typing import Any

from perf_lab.measure.clock import EventTimer, WallTimer

from .. import test_measure
from . import mutant

timers = test_measure.timers
QUEUED = "test_measure::test_what_was_queued_before_is_not_timed"


@mutant(timers, killed_by=QUEUED)
def never_waits(calls: Any, fake: Any) -> WallTimer:
    """The host's clock is read when the launches are out, not when the work is done."""
    return WallTimer(calls, "fake", 1, fake.now, wait=lambda device: None)


@mutant(timers, killed_by=QUEUED)
def flush_inside(calls: Any, fake: Any) -> EventTimer:
    """The cache is flushed after the first event, and its time is the first call's."""
    return EventTimer([lambda: fake.launch(1.0), *calls[1:]], fake.event)
