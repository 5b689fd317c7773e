"""One benchmark: assert, then time, then assert again, and say what it cost.

The object behind the `bench` fixture. It knows ops only as contracts.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from perf_lab import machine
from perf_lab.measure.ceilings import Ceilings, cache_bytes, ceilings
from perf_lab.measure.clock import EventTimer, GraphTimer, WallTimer, device_timer, elapsed
from perf_lab.measure.memory import peak_bytes
from perf_lab.numerics import build, call_text, judge
from perf_lab.op import Cost, Implementation, LimitError
from perf_lab.strategies import Input, dtype_name

COLD = 3  # buffers of this many caches, so that nothing of a round is left over for the next
MOST_COPIES = 512  # a call of under 350 kB on a 60 MB cache stays warm, and is marked so
ROUNDS = range(3, 51)
ROUND_BUDGET_S = 1.0
ONE_ROUND_ABOVE_S = 2.0
ALONE_ABOVE_S = 1.0  # on a CPU: in so long a call the few megabytes of its inputs are nothing, warm or cold


class CeilingError(AssertionError):
    """A result faster than the machine can be: the measurement is wrong."""


@dataclasses.dataclass
class Record:
    """What one benchmark of this session measured; `info` is the extra_info of its file."""

    benchmark: Any
    key: tuple[Any, ...]
    impl: str
    reference: str
    info: dict[str, Any]

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return self.benchmark.stats.stats.median


class Bench:
    """Times work for one test, through pytest-benchmark's fixture; see `op` and `run`."""

    def __init__(self, benchmark: Any, records: list[Record], limit_s: float) -> None:
        self._benchmark = benchmark
        self._records = records
        self.limit_s = limit_s

    def ceilings(self, device: str) -> Ceilings:
        """The measured ceilings of a device."""
        return ceilings(device)

    def rate(self, device: str, dtype: torch.dtype) -> float:
        """Measured FLOP/s of a matrix product."""
        return ceilings(device).rate(dtype)

    def bandwidth(self, device: str) -> float:
        """Measured bytes/s of memory."""
        return ceilings(device).bandwidth

    def skip_above_limit(self, estimate_s: float) -> None:
        """Skip, visibly and with the estimate, what would take longer than the run's limit for one call."""
        if estimate_s > self.limit_s:
            pytest.skip(
                f"one call would take about {estimate_s:.3g} s here, above {self.limit_s:g} s (--longest)"
            )

    def op(
        self,
        impl: Implementation,
        *inputs: Any,
        device: str,
        estimate: float | None = None,
        info: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Benchmark one implementation of an op.

        inputs and kwargs: the call, tensors as `Input` recipes. As many copies of
        them are drawn as it takes to fill three caches, each with numbers of its
        own, so that every call is cold. The first and, after timing, the last
        result are held to the oracle. estimate: seconds of one call; by default
        four times what the op's cost takes at the machine's ceilings.
        """
        first = tuple(build(value, device) for value in inputs)
        fixed = {key: build(value, device) for key, value in kwargs.items()}
        cost = impl.op.cost(*first, **fixed) if impl.op.cost else None
        dtype = first[0].dtype
        if estimate is None and cost:
            estimate = 4 * ceilings(device).floor_seconds(cost, dtype)
        self.skip_above_limit(estimate or 0.0)
        call_bytes = cost.bytes if cost else _tensor_bytes(first)
        alone = device == "cpu" and (estimate or 0) > ALONE_ABOVE_S
        count = 1 if alone else copies_for(call_bytes, device)
        copies = [first, *_others(first, inputs, device, count - 1)]
        call = call_text(impl, inputs, kwargs, device)
        try:
            self._check(impl, impl(*first, **fixed), first, fixed, call)
        except LimitError as limit:
            pytest.skip(str(limit))
        calls = [lambda args=args: impl.fn(*args, **fixed) for args in copies]
        for warm_up in calls:
            warm_up()
        timer = device_timer(calls, device)
        self._feed(timer)
        self._check(impl, timer.results[-1], copies[-1], fixed, call)
        self._record(
            impl.name,
            impl.op.reference,
            device,
            dtype,
            cost,
            {
                "method": timer.method,
                "cache": "cold" if len(copies) * call_bytes >= COLD * cache_bytes(device) else "warm",
                "shapes": [list(arg.shape) for arg in first if isinstance(arg, Tensor)],
                "peak_bytes": peak_bytes(calls[0], device),
                **(info or {}),
            },
        )

    def run(
        self,
        work: Callable[[], Any],
        *,
        device: str,
        verify: Callable[[Any], None],
        reference: str,
        estimate: float | None = None,
        rehearse: Callable[[], None] | None = None,
        dtype: torch.dtype = torch.float32,
        cost: Cost | None = None,
        rounds: int | None = None,
        info: dict[str, Any] | None = None,
    ) -> None:
        """Benchmark any work, timed whole with the device synchronized on both sides.

        work: gives its result. verify: raises when that is wrong; called before
        and after timing. reference: the value of the `impl` parameter that the
        ratio is taken against. estimate: seconds of one call. rehearse: for calls
        of many seconds, a short version of the work that checks itself, in place
        of the check before timing.
        """
        self.skip_above_limit(estimate or 0.0)
        if rehearse:
            rehearse()
        else:
            verify(work())
        timer = WallTimer([work], device)
        self._feed(timer, rounds, estimate)
        self._guard(lambda: verify(timer.results[-1]))
        peak = {} if (estimate or 0) > ONE_ROUND_ABOVE_S else {"peak_bytes": peak_bytes(work, device)}
        info = {"method": timer.method, "cache": "warm", **peak, **(info or {})}
        self._record(str(self._benchmark.params["impl"]), reference, device, dtype, cost, info)

    def _check(
        self, impl: Implementation, got: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: str
    ) -> None:
        self._guard(lambda: judge(impl, got, args, kwargs, call))

    def _guard(self, check: Callable[[], None]) -> None:
        """Run a check; when it fails, what was timed must not be saved as a result."""
        try:
            check()
        except BaseException:
            self._benchmark.has_error = True
            raise

    def _feed(
        self,
        timer: WallTimer | EventTimer | GraphTimer,
        rounds: int | None = None,
        estimate: float | None = None,
    ) -> None:
        """Have pytest-benchmark take its statistics over rounds that the device times."""
        rounds = rounds or _rounds(
            timer.round() if (estimate or 0) <= ONE_ROUND_ABOVE_S else estimate or 0, timer
        )
        self._benchmark.pedantic(lambda: elapsed.add(timer.round()), rounds=rounds)

    def _record(
        self,
        impl: str,
        reference: str,
        device: str,
        dtype: torch.dtype,
        cost: Cost | None,
        info: dict[str, Any],
    ) -> None:
        benchmark = self._benchmark
        name = benchmark.fullname.partition("[")[0]
        key = (name, *((k, str(v)) for k, v in sorted(benchmark.params.items()) if k != "impl"))
        benchmark.extra_info.update(
            device=device,
            device_name=machine.device_name(device),
            impl=impl,
            reference=reference,
            dtype=dtype_name(dtype),
        )
        benchmark.extra_info.update(info)
        record = Record(benchmark, key, impl, reference, benchmark.extra_info)
        if "tokens" in info and not benchmark.disabled:
            benchmark.extra_info["tokens_per_s"] = info["tokens"] / record.seconds
        if cost and not benchmark.disabled:
            self._guard(lambda: add_cost(record, cost, dtype, ceilings(device)))
        if not benchmark.disabled:
            self._records.append(record)
            add_ratios(self._records, key)


def add_cost(record: Record, cost: Cost, dtype: torch.dtype, of: Ceilings) -> None:
    """Note cost, rates and the fraction of the ceiling. Raises CeilingError above that and its spread."""
    seconds = record.seconds
    fraction = of.fraction(cost, dtype, seconds)
    record.info.update(
        flops=cost.flops,
        least_bytes=cost.bytes,
        gb_per_s=cost.bytes / seconds / 1e9,
        tflop_per_s=cost.flops / seconds / 1e12,
        fraction_of_ceiling=fraction,
    )
    if fraction > 1 + of.spread:
        raise CeilingError(
            f"{record.benchmark.name} took {seconds:.3g} s, {fraction:.3f} of the most the machine can do"
            f" ({of}, which moved by {of.spread:.0%}): the measurement is wrong, or the stated cost is"
        )


def add_ratios(records: Sequence[Record], key: tuple[Any, ...]) -> None:
    """In the records of one key, note the reference's time over each one's own: above 1 is faster."""
    same = [record for record in records if record.key == key]
    reference = next((record for record in same if record.impl == record.reference), None)
    if reference is None:
        return
    for record in same:
        record.info["ratio"] = reference.seconds / record.seconds


def copies_for(bytes_a_call: int, device: str) -> int:
    """How many sets of buffers make every call cold: three caches full, from two to MOST_COPIES."""
    return min(max(2, math.ceil(COLD * cache_bytes(device) / max(1, bytes_a_call))), MOST_COPIES)


def _tensor_bytes(values: Sequence[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def _others(
    first: tuple[Any, ...], inputs: tuple[Any, ...], device: str, count: int
) -> list[tuple[Any, ...]]:
    """Further sets of inputs, each with numbers of its own in the same layout."""
    return [
        tuple(_another(value, recipe, shift, device) for value, recipe in zip(first, inputs, strict=True))
        for shift in range(1, count + 1)
    ]


def _another(value: Any, recipe: Any, shift: int, device: str) -> Any:
    """A contiguous input shifted along by some elements: a copy on the device, where drawing
    hundreds of sets anew would take minutes. One of another layout is drawn anew.
    """
    if not isinstance(recipe, Input):
        return value
    if recipe.layout == "contiguous":
        return value.roll(shift)
    return dataclasses.replace(recipe, seed=recipe.seed + shift).on(device)


def _rounds(seconds_a_call: float, timer: WallTimer | EventTimer | GraphTimer) -> int:
    """As many rounds as fit the budget, from 3 to 50; one for what takes many seconds."""
    if seconds_a_call > ONE_ROUND_ABOVE_S:
        return 1
    calls = timer.count if isinstance(timer, GraphTimer) else len(timer.calls)
    repeat = timer.repeat if isinstance(timer, WallTimer) else 1
    fit = int(ROUND_BUDGET_S / max(1e-9, seconds_a_call * calls * repeat))
    return min(max(fit, ROUNDS.start), ROUNDS.stop - 1)
