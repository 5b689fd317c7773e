"""Tune this machine: measure each candidate of a kernel on inputs of its own, keep the fastest right one.

Nothing here is called while a kernel works for somebody: arguments are drawn
for the purpose, results are new tensors, and a table is written in the end.
"""

import concurrent.futures
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from perf_lab import tuning
from perf_lab.measure.bench import copies_for
from perf_lab.measure.clock import device_timer
from perf_lab.numerics import WrongError, judge
from perf_lab.op import load_all
from perf_lab.tuning import Config, Entry, Key, Tunable

ROUNDS = 15
WORTH = 0.01  # faster than the default by this part, or the default stays: less is noise
FINALISTS = 3  # of a key, measured a second time

Measure = Callable[[Tunable, Key, Config], float | None]


def tune(
    ops: Sequence[str], say: Callable[[str], None], file: Path | None = None, only: Sequence[str] = ()
) -> Path:
    """Tune these ops (none: all that can be) on the current GPU and write the table; gives its path.

    only: texts that a key's spelling must contain, to tune a part. Raises ValueError
    without a GPU or for an op that cannot be tuned.
    """
    load_all()
    if not torch.cuda.is_available():
        raise ValueError("tune: no GPU is visible to torch, and kernels are tuned on one")
    jobs = list(_jobs(_asked(ops), only))
    compile_all(jobs, say)
    entries = [tuned(tunable, key, seconds, say) for tunable, key in jobs]
    return tuning.save(entries, torch.cuda.get_device_name(), file)


def _asked(ops: Sequence[str]) -> list[Tunable]:
    if unknown := set(ops) - set(tuning.TUNABLES):
        raise ValueError(f"tune: got {sorted(unknown)}, accepted are {sorted(tuning.TUNABLES)}")
    return [tunable for name, tunable in tuning.TUNABLES.items() if name in ops or not ops]


def _jobs(tunables: Iterable[Tunable], only: Sequence[str]) -> Iterable[tuple[Tunable, Key]]:
    for tunable in tunables:
        for key in tunable.keys:
            if all(part in tuning.text(key) for part in only):
                yield tunable, key


def configurations(tunable: Tunable, key: Key) -> Sequence[Config]:
    """The default, then every other candidate once."""
    found = [dict(tunable.default(key))]
    for config in map(dict, tunable.candidates(key)):
        if config not in found:
            found.append(config)
    return found


def tuned(tunable: Tunable, key: Key, measure: Measure, say: Callable[[str], None]) -> Entry:
    """The best configuration of a key: the fastest finalist of a second measurement, if it is worth it.

    measure: seconds of a call, None for a configuration that is wrong or cannot run.
    Raises RuntimeError when not even the default can be measured.
    """
    configs = configurations(tunable, key)
    times = {i: measure(tunable, key, config) for i, config in enumerate(configs)}
    ran = {i: seconds for i, seconds in times.items() if seconds is not None}
    if 0 not in ran:
        raise RuntimeError(f"{tunable.op} {tuning.text(key)}: the default {configs[0]} does not run")
    finalists = {0, *sorted(ran, key=ran.__getitem__)[:FINALISTS]}
    again = {i: measure(tunable, key, configs[i]) or ran[i] for i in finalists}
    best = min(again, key=again.__getitem__)
    if again[best] > again[0] * (1 - WORTH):
        best = 0
    us, default_us = round(again[best] * 1e6, 3), round(again[0] * 1e6, 3)
    say(
        f"{tunable.op} {tuning.text(key)}: {us} us, {default_us} us by default; "
        f"{len(ran)} of {len(configs)} ran; {configs[best]}"
    )
    return Entry(tunable.op, tunable.revision, key, configs[best], us, default_us)


_sets: dict[str, list[tuple[Any, ...]]] = {}  # of the key measured last


def seconds(tunable: Tunable, key: Key, config: Config) -> float | None:
    """Device seconds of a call with cold caches; None where it fails or its result is wrong."""
    name = f"{tunable.op} {tuning.text(key)}"
    if name not in _sets:
        _sets.clear()
        _sets[name] = argument_sets(tunable, key)
    sets = _sets[name]
    calls = [lambda args=args: tunable.run(config, *args) for args in sets]
    impl = load_all()[tunable.op][tunable.impl]
    try:
        judge(impl, calls[0](), sets[0], {}, f"{name} {config}")
        timer = device_timer(calls, "cuda")
        timer.round()
        return statistics.median(timer.round() for _ in range(ROUNDS))
    except (WrongError, RuntimeError, ValueError, TypeError):  # triton's own errors are RuntimeErrors or so
        torch.cuda.synchronize()
        return None


def argument_sets(tunable: Tunable, key: Key) -> list[tuple[Any, ...]]:
    """As many sets of random arguments as make every call cold."""
    first = tuple(
        torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape, dtype in tunable.inputs(key)
    )
    size = 2 * max(value.numel() * value.element_size() for value in first)
    return [first, *(tuple(v.roll(i) for v in first) for i in range(1, copies_for(size, "cuda")))]


def compile_all(jobs: Sequence[tuple[Tunable, Key]], say: Callable[[str], None]) -> None:
    """Compile every candidate in processes side by side: their binaries are then in Triton's cache."""
    calls = [
        (tunable.op, tuning.text(key), config)
        for tunable, key in jobs
        for config in configurations(tunable, key)
    ]
    workers = min(16, os.cpu_count() or 1, max(1, len(calls) // 8))
    say(f"compiling {len(calls)} kernels in {workers} processes")
    if workers > 1:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            list(pool.map(_compile, [calls[start::workers] for start in range(workers)]))


def _compile(calls: Sequence[tuple[str, str, Config]]) -> None:
    """Run each call once; what fails here fails again where it is measured."""
    load_all()
    for op, key_text, config in calls:
        tunable = tuning.TUNABLES[op]
        key = next(key for key in tunable.keys if tuning.text(key) == key_text)
        args = [torch.ones(shape, dtype=getattr(torch, d), device="cuda") for shape, d in tunable.inputs(key)]
        try:
            tunable.run(config, *args)
        except Exception:
            continue
