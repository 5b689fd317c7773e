"""What this machine can do at the most, measured: the ceilings that results are held against.

Measured once a session, on first use; the best of several tries, since a
ceiling is a maximum. No result can be above one: `Ceilings.fraction` measures
again before it believes that, and whoever called it must then fail.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from perf_lab.measure.clock import EventTimer, WallTimer
from perf_lab.op import Cost
from perf_lab.strategies import dtype_name

TRIES = 5
AGAIN = 5
WIDEST = 0.25

VARIABLE = "PERF_LAB_CEILINGS"
"""Names a file in which sessions share what they measured: each starts from the highest so far."""


def _best_seconds(work: Callable[[], Any], device: str) -> float:
    work()
    timer = EventTimer([work]) if device == "cuda" else WallTimer([work], device)
    return min(timer.round() for _ in range(TRIES))


def cache_bytes(device: str) -> int:
    """The size of the last-level cache: what cold inputs must be rotated past."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).L2_cache_size
    return _cpu_cache_bytes() or 32 * 2**20


@functools.cache
def _cpu_cache_bytes() -> int:
    import cpuinfo

    size = cpuinfo.get_cpu_info().get("l3_cache_size", 0)
    return size if isinstance(size, int) else 0


@dataclass
class Ceilings:
    """Measured maxima of one device: copy and read bandwidth in bytes/s, matrix rates in FLOP/s by dtype."""

    device: str
    copy: float = 0.0
    read: float = 0.0
    matrix: dict[str, float] = field(default_factory=dict)
    seen: dict[str, list[float]] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """How far the ceilings of this session moved, highest over lowest less 1, at most WIDEST: on a
        machine that others use they move, and a result may be above one by as much.
        """
        moved = [max(rates) / min(rates) - 1 for rates in self.seen.values()]
        return min(max(moved, default=0.0), WIDEST)

    def _note(self, what: str, rate: float) -> float:
        self.seen.setdefault(what, []).append(rate)
        return rate

    @property
    def bandwidth(self) -> float:
        """Bytes/s through memory: the larger of copying (read plus written) and reading."""
        if not self.copy:
            self.measure_bandwidth()
        return max(self.copy, self.read)

    def measure_bandwidth(self) -> None:
        """Copy and sum buffers of 8 times the cache (at least 256 MiB); keep what is faster than before."""
        size = max(8 * cache_bytes(self.device), 2**28) * (4 if self.device == "cuda" else 1)
        source = torch.rand(size // 4, device=self.device)
        target = torch.empty_like(source)
        copy = 2 * size / _best_seconds(lambda: target.copy_(source), self.device)
        read = size / _best_seconds(source.sum, self.device)
        self.copy = max(self.copy, self._note("copy", copy))
        self.read = max(self.read, self._note("read", read))

    def rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of a square matrix product of random numbers in this dtype, through torch."""
        if dtype_name(dtype) not in self.matrix:
            self.measure_rate(dtype)
        return self.matrix[dtype_name(dtype)]

    def measure_rate(self, dtype: torch.dtype) -> None:
        """Time one matrix product; keep the rate if it is above the one known."""
        n = {"cuda": 8192, "mps": 4096, "cpu": 2048}[self.device]
        a, b = (torch.randn(n, n, device=self.device).to(dtype) for _ in range(2))
        rate = self._note(dtype_name(dtype), 2 * n**3 / _best_seconds(lambda: a @ b, self.device))
        self.matrix[dtype_name(dtype)] = max(self.matrix.get(dtype_name(dtype), 0.0), rate)

    def floor_seconds(self, cost: Cost, dtype: torch.dtype) -> float:
        """The time under which this device cannot do that much work: the longer of moving the
        bytes and computing the FLOPs at the matrix rate.
        """
        return max(cost.bytes / self.bandwidth, cost.flops / self.rate(dtype))

    def fraction(self, cost: Cost, dtype: torch.dtype, seconds: float) -> float:
        """Floor over measured time. Above 1 the ceilings are measured again, AGAIN times at the most:
        a machine that others used may have shown less than it can. A value that stays above
        1 + spread says that the measurement of `seconds` is wrong.
        """
        for _ in range(AGAIN):
            if self.floor_seconds(cost, dtype) <= seconds:
                break
            self.measure_bandwidth()
            self.measure_rate(dtype)
        return self.floor_seconds(cost, dtype) / seconds

    def measure(self) -> None:
        """Bandwidth and the rates of float32 and bfloat16, unless they are known."""
        _ = self.bandwidth
        for dtype in (torch.float32, torch.bfloat16):
            self.rate(dtype)

    def as_dict(self) -> dict[str, Any]:
        """What was measured so far, for a results file; None for what was not."""
        return {
            "copy_bytes_per_s": self.copy or None,
            "read_bytes_per_s": self.read or None,
            "matrix_flop_per_s": dict(self.matrix),
        }

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in self.matrix.items())
        memory = f"copy {self.copy / 1e9:.4g} GB/s, read {self.read / 1e9:.4g} GB/s"
        return f"{self.device}: {memory}, matrix product {rates}"


@functools.cache
def ceilings(device: str) -> Ceilings:
    """The one `Ceilings` of a device in this process, with what the file named by VARIABLE holds."""
    known = _shared().get(device, {})
    return Ceilings(
        device,
        known.get("copy_bytes_per_s") or 0.0,
        known.get("read_bytes_per_s") or 0.0,
        known.get("matrix_flop_per_s") or {},
    )


def _shared() -> dict[str, Any]:
    path = os.environ.get(VARIABLE)
    return json.loads(Path(path).read_text()) if path and Path(path).exists() else {}


def share(devices: Iterable[str]) -> None:
    """Write what these devices have shown to the file named by VARIABLE, if it names one."""
    if path := os.environ.get(VARIABLE):
        scratch = Path(f"{path}.{os.getpid()}")
        scratch.write_text(json.dumps({device: ceilings(device).as_dict() for device in devices}))
        scratch.replace(path)
