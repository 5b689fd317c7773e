"""Seconds of work on a device, and the timer that hands them to pytest-benchmark.

Work on a GPU is asynchronous: a host clock read before it is done measures the
launch. So the device times itself wherever it can:

wall     host clock around synchronized work: the CPU, Metal, and whole
         generations, whose host time is part of what their user waits for;
events   CUDA events around the work, for kernels that outlast a launch;
graph    CUDA events around the replay of a graph of many calls, for short
         kernels: no launch gaps, and each call on inputs of its own.

Everything that prepares a round (drawing inputs, flushing) runs before the
first time stamp.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

GRAPH_BELOW_S = 0.02  # a call above this hides its launches by itself


class Timer(Protocol):
    """Times one round of work: gives seconds per call of it."""

    method: str

    def round(self) -> float:
        """Run the work once and give the seconds that one call took."""
        ...


class ElapsedClock:
    """A timer function for pytest-benchmark that stands still, but for what is added to it.

    Its own statistics, tables and files are then made of durations that a
    device measured.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """The seconds added so far."""
        return self.seconds

    def add(self, seconds: float) -> None:
        """Advance by the duration of one round."""
        self.seconds += seconds


elapsed = ElapsedClock()


def synchronize(device: str) -> None:
    """Wait until all work queued on the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


@dataclass
class WallTimer:
    """Host clock around `calls`, the device synchronized on both sides.

    Each call's last result is kept, so that no call writes into memory that is still warm from another's.
    """

    calls: Sequence[Callable[[], Any]]
    device: str
    repeat: int = 1
    now: Callable[[], float] = time.perf_counter
    wait: Callable[[str], None] = synchronize
    method: str = "wall"
    results: list[Any] = field(default_factory=list)

    def round(self) -> float:
        """Seconds per call."""
        results = self.results = self.results or [None] * len(self.calls)
        self.wait(self.device)
        start = self.now()
        for _ in range(self.repeat):
            for index, call in enumerate(self.calls):
                results[index] = call()
        self.wait(self.device)
        return (self.now() - start) / (self.repeat * len(self.calls))


@dataclass
class EventTimer:
    """CUDA events around `calls`, on the current stream. Results are kept as by `WallTimer`."""

    calls: Sequence[Callable[[], Any]]
    event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)
    method: str = "events"
    results: list[Any] = field(default_factory=list)

    def round(self) -> float:
        """Seconds per call."""
        results = self.results = self.results or [None] * len(self.calls)
        start, end = self.event(), self.event()
        start.record()
        for index, call in enumerate(self.calls):
            results[index] = call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / len(self.calls)


class GraphTimer:
    """CUDA events around the replay of a graph that holds every one of `calls`.

    The results of all calls are kept alive during capture, so that no call
    writes into the memory (and the cache lines) of another's result.
    """

    method = "graph"

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()  # allocators and handles of this stream, outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [call() for call in calls]
        self.count = len(calls)
        self._events = EventTimer([self.graph.replay])

    def round(self) -> float:
        """Seconds per call."""
        return self._events.round() / self.count


def device_timer(calls: Sequence[Callable[[], Any]], device: str) -> WallTimer | EventTimer | GraphTimer:
    """The timer for kernels: wall on the CPU and Metal; on CUDA a graph when a round is short
    and the calls can be captured, else events. The calls must be warm.
    """
    if device != "cuda":
        once = WallTimer(calls, device).round() * len(calls)
        repeat = max(1, math.ceil(1e-3 / max(once, 1e-7)))  # a round of 1 ms at least
        return WallTimer(calls, device, repeat=repeat)
    events = EventTimer(calls)
    if events.round() < GRAPH_BELOW_S:
        try:
            return GraphTimer(calls)
        except RuntimeError:  # work that reads back to the host cannot be captured
            torch.cuda.synchronize()
    return events
