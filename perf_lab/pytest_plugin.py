"""What the suites share under pytest: options, parametrization over what exists, header, summary.

Loaded by a conftest with `pytest_plugins = ["perf_lab.pytest_plugin"]`.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis
import hypothesis.stateful
import pytest
import torch

from perf_lab import machine
from perf_lab.op import OPS, Implementation, Op, load_all, outside
from perf_lab.strategies import dtype_name

PROFILE_VARIABLE = "PERF_LAB_PROFILE"


@dataclasses.dataclass
class Selection:
    """What --device, --length and --impl narrow a run to; empty means everything."""

    devices: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    impls: tuple[str, ...] = ()


selection = Selection()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of both suites."""
    group = parser.getgroup("perf_lab")
    group.addoption(
        "--device",
        action="append",
        default=[],
        choices=machine.DEVICES,
        help="run on this device only (repeatable); default: every device that is here",
    )
    group.addoption(
        "--length",
        action="append",
        default=[],
        type=int,
        metavar="N",
        help="benchmark this length only (repeatable); default: the lengths each benchmark names",
    )
    group.addoption(
        "--impl",
        action="append",
        default=[],
        metavar="NAME | OP=MODULE:FUNCTION",
        help="run this implementation only (repeatable); with '=' also add it to the op for this run",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the hypothesis profile, and fill the table and the selection before test modules are imported."""
    machine.interpret_without_gpu()
    config.addinivalue_line("markers", "real_model: runs on the weights of SmolLM2-135M-Instruct")
    _set_profile()
    try:
        load_all()
        names = tuple(outside(text).name if "=" in text else text for text in config.getoption("impl"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    asked = tuple(config.getoption("device"))
    for device in asked:
        if device not in machine.devices():
            here = ", ".join(machine.devices())
            raise pytest.UsageError(f"--device {device}: {machine.why_missing(device)}; here: {here}")
    if negative := [n for n in config.getoption("length") if n < 1]:
        raise pytest.UsageError(
            f"--length: got {negative[0]}, accepted are positive numbers of tokens or columns"
        )
    selection.devices, selection.lengths, selection.impls = asked, tuple(config.getoption("length")), names


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep those of the asked implementations where `impl` is a plain name; refuse one that nobody has."""
    if not selection.impls:
        return
    named = {item: item.callspec.params.get("impl") for item in items if hasattr(item, "callspec")}
    plain = {item: name for item, name in named.items() if isinstance(name, str)}
    known = {impl.name for op in OPS.values() for impl in op} | set(plain.values())
    if unknown := sorted(set(selection.impls) - known):
        raise pytest.UsageError(f"--impl: got {unknown}, there are {sorted(known)}")
    dropped = [item for item, name in plain.items() if name not in selection.impls]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in set(dropped)]


def _set_profile() -> None:
    """quick: every push; full: before a merge; nightly: hours are fine."""
    examples = {"quick": 15, "full": 150, "nightly": 3000}
    checks = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    for profile, count in examples.items():
        hypothesis.settings.register_profile(
            profile,
            max_examples=count,
            stateful_step_count=30,
            deadline=None,  # the first call of a compiled kernel takes seconds
            suppress_health_check=checks,  # tensors are large draws, kernels slow tests
            print_blob=True,
        )
    chosen = os.environ.get(PROFILE_VARIABLE, "quick")
    if chosen not in examples:
        raise pytest.UsageError(f"{PROFILE_VARIABLE}: got {chosen!r}, accepted are {sorted(examples)}")
    hypothesis.settings.load_profile(chosen)


def pytest_report_header() -> list[str]:
    """The machine and the profile, on top of every run."""
    names = ", ".join(f"{device} ({machine.device_name(device)})" for device in machine.devices())
    how = "interpreted" if machine.interpreting() else "compiled"
    return [
        f"perf_lab: {names}; torch {torch.__version__}; Triton kernels {how}; "
        f"hypothesis profile {os.environ.get(PROFILE_VARIABLE, 'quick')} (set {PROFILE_VARIABLE})"
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which stated limits of implementations were met, and how often."""
    from perf_lab.numerics import limits_met

    if limits_met:
        terminalreporter.section("limits of implementations met")
        for reason, count in sorted(limits_met.items()):
            terminalreporter.write_line(f"{count:6d} calls left out: {reason}")


def devices(*candidates: str) -> tuple[str, ...]:
    """Of these device types, those a run looks at (all, or those that --device names)."""
    return tuple(d for d in candidates or machine.DEVICES if not selection.devices or d in selection.devices)


def device_params(*candidates: str) -> list[Any]:
    """The devices as pytest parameters; one that is missing here is a skip with its reason."""
    return [
        pytest.param(
            device,
            marks=[] if device in machine.devices() else _skip(f"{device}: {machine.why_missing(device)}"),
        )
        for device in devices(*candidates)
    ]


def _skip(reason: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.skip(reason=reason)]


def on_devices(*candidates: str) -> pytest.MarkDecorator:
    """Parametrize `device` over these device types (default: all)."""
    return pytest.mark.parametrize("device", device_params(*candidates))


def lengths(*default: int) -> pytest.MarkDecorator:
    """Parametrize `length` over these, or over what --length names."""
    return pytest.mark.parametrize("length", selection.lengths or default)


def implementations(
    op: Op, *, dtypes: bool = False, only: Callable[[Implementation], bool] = lambda impl: True
) -> Callable[[Any], Any]:
    """Parametrize a test over (device, impl), and dtype too if asked, of everything registered for `op`.

    What cannot run here is a skip with its reason; what is declared a known
    failure of this test is a strict xfail.
    """

    def decorate(test: Any) -> Any:
        params = [
            param for impl in _selected(op) if only(impl) for param in _params(impl, test.__name__, dtypes)
        ]
        names = ("device", "impl", "dtype") if dtypes else ("device", "impl")
        return pytest.mark.parametrize(names, params)(test)

    return decorate


def drive(state_machine: Callable[[], Any]) -> None:
    """Run a hypothesis RuleBasedStateMachine (a class, or a function that makes one) under the
    profile in force; a test calls it, so that it can be parametrized over implementations.
    """
    hypothesis.stateful.run_state_machine_as_test(
        state_machine,  # type: ignore[arg-type]  # a function that makes one serves as well
        settings=hypothesis.settings(),
    )


def _selected(op: Op) -> Iterable[Implementation]:
    return [impl for impl in op if not selection.impls or impl.name in selection.impls]


def _params(impl: Implementation, test: str, dtypes: bool) -> Iterable[Any]:
    for device in devices(*impl.candidates):
        why_not = impl.why_not(device)
        if not dtypes:
            marks = _skip(why_not) if why_not else _expected(impl, test, device)
            yield pytest.param(device, impl, id=f"{device}-{impl.name}", marks=marks)
            continue
        for dtype in impl.dtypes:
            name = f"{device}-{impl.name}-{dtype_name(dtype)}"
            no_dtype = "mps has no float64" if (device, dtype) == ("mps", torch.float64) else None
            reason = why_not or no_dtype
            marks = _skip(reason) if reason else _expected(impl, test, device, dtype)
            yield pytest.param(device, impl, dtype, id=name, marks=marks)


def _expected(
    impl: Implementation, test: str, device: str, dtype: torch.dtype | None = None
) -> list[pytest.MarkDecorator]:
    """A strict xfail where the implementation declares that this test fails there."""
    cases = [f"[{device}-{dtype_name(dtype)}]"] if dtype else []
    known = (impl.known_failures.get(test + case) for case in (*cases, f"[{device}]", ""))
    reason = next(filter(None, known), None)
    return [pytest.mark.xfail(reason=reason, strict=True)] if reason else []


def timed(
    op: Op,
    *,
    only: Callable[[Implementation], bool] = lambda impl: True,
    on: tuple[str, ...] = machine.DEVICES,
) -> Callable[[Any], Any]:
    """Parametrize a benchmark over (device, impl) of everything registered for `op`, on these device types.

    An interpreted kernel on the CPU is a visible skip: the interpreter checks, it does not time.
    """

    def decorate(test: Any) -> Any:
        params = [
            _timed_param(impl, device)
            for impl in _selected(op)
            if only(impl)
            for device in devices(*impl.candidates)
            if device in on
        ]
        return pytest.mark.parametrize(("device", "impl"), params)(test)

    return decorate


def _timed_param(impl: Implementation, device: str) -> Any:
    why_not = impl.why_not(device)
    if why_not is None and device not in impl.devices:
        why_not = f"{impl}: on {device} only interpreted, which is checked but not timed"
    return pytest.param(device, impl, id=f"{device}-{impl.name}", marks=_skip(why_not) if why_not else [])
