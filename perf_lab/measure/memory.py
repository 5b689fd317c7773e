"""Peak memory of one call, in bytes beyond what was allocated before it."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], Any], device: str) -> int | None:
    """The most memory that the allocator held for `work` at once, its result included.

    On CUDA from the allocator's own counters, on the CPU from the allocations
    that the profiler records; None on Metal, which tells neither.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if device == "cpu":
        return _cpu_peak_bytes(work)
    return None


def _cpu_peak_bytes(work: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = work()
    del result
    events = recorded.profiler.kineto_results.events() if recorded.profiler else []
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
