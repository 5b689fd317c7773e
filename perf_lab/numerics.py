"""How right is decided: a float64 oracle, an allowed error, one message.

The error allowed to an implementation in one element of its output is

    magnitude * (2 * e + ULPS * eps(dtype) + ceil(log2(n + 1)) * eps(accumulator)) + floor

magnitude    the size of what was summed up to that element (|p| @ |v| for an
             attention output), computed in float64: the unit of rounding errors;
e            the largest error, in that unit, that the plain torch computation in
             the same dtype makes on the same input, but at most CAP: so a
             baseline that breaks down (inf, NaN) excuses nothing;
ULPS         2: one rounding of the result, and one of a factor in it;
n            the number of terms summed, added pairwise: Higham, Accuracy and
             Stability of Numerical Algorithms, 2nd edition, section 4.2;
accumulator  float32, and float64 for float64;
floor        what underflow can cost: two spacings of the dtype's denormals, and
             for those above float16 the smallest normal float32 (flush to zero).

The same gate holds on every machine.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from perf_lab.op import Implementation, LimitError
from perf_lab.strategies import Input

ULPS = 2
CAP = 2**-5

limits_met: Counter[str] = Counter()


class WrongError(AssertionError):
    """An output outside the allowed error; the message says got, should be, and how to see it."""


def eps(dtype: torch.dtype) -> float:
    """The spacing of the dtype's numbers at 1."""
    return torch.finfo(dtype).eps


def upcast(value: Any) -> Any:
    """A float64 copy, contiguous, of every floating tensor; other values as they are.
    On a device without float64 (mps) the copy is on the CPU.
    """
    if not isinstance(value, Tensor):
        return value
    value = value.cpu() if value.device.type == "mps" else value
    value = value.clone(memory_format=torch.contiguous_format)
    return value.double() if value.is_floating_point() else value


def allowed_error(
    should_be: Tensor,
    baseline: Tensor | None,
    magnitude: Tensor,
    dtype: torch.dtype,
    reduction: int,
) -> Tensor:
    """The allowed error of each element, in float64; the formula is the module's docstring."""
    accumulator = torch.float64 if dtype is torch.float64 else torch.float32
    relative = ULPS * eps(dtype) + math.ceil(math.log2(reduction + 1)) * eps(accumulator)
    if baseline is not None:
        relative += 2 * _baseline_error(should_be, baseline, magnitude, dtype)
    return relative * magnitude + _floor(dtype)


def _floor(dtype: torch.dtype) -> float:
    finfo = torch.finfo(dtype)
    denormal = ULPS * finfo.smallest_normal * finfo.eps
    return denormal if dtype is torch.float16 else max(denormal, finfo.smallest_normal)


def _baseline_error(should_be: Tensor, baseline: Tensor, magnitude: Tensor, dtype: torch.dtype) -> float:
    normal = magnitude > torch.finfo(dtype).smallest_normal
    error = ((baseline.to(should_be) - should_be).abs() / magnitude)[normal]
    error = error[error.isfinite()]
    return min(error.max().item(), CAP) if error.numel() else 0.0


def assert_close(got: Tensor, should_be: Tensor, allowed: Tensor | float, call: str) -> None:
    """Raise WrongError unless |got - should_be| <= allowed in every element.

    A NaN or infinity where should_be has none is an error, and so is a missing
    one. `call` is the code that reproduces `got`, printed with the worst element.
    """
    if got.shape != should_be.shape:
        raise WrongError(
            f"wrong shape\n  got        {tuple(got.shape)}\n  should be  {tuple(should_be.shape)}"
            f"\n  reproduce  {call}"
        )
    found = upcast(got).to(should_be.device)
    allowed = torch.as_tensor(allowed, dtype=torch.float64, device=should_be.device).expand_as(should_be)
    excess = (found - should_be).abs() / allowed
    same = (found == should_be) | (found.isnan() & should_be.isnan())
    excess = torch.where(same, 0.0, torch.where(excess.isnan(), math.inf, excess))
    wrong = excess > 1
    if not wrong.any():
        return
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    raise WrongError(
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, the worst at {list(worst)}\n"
        f"  got        {found[worst].item():.9g}\n"
        f"  should be  {should_be[worst].item():.9g}, allowed error {allowed[worst].item():.3g}"
        f" (this is {excess[worst].item():.3g} times that)\n"
        f"  reproduce  {call}"
    )


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within it, memory that torch hands out uninitialized holds NaN (integers: the largest),
    so that an output element that nothing wrote shows.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def build(value: Any, device: str) -> Any:
    """The tensor of an `Input` recipe, a tensor moved to `device`, any other value as it is."""
    if isinstance(value, Input):
        return value.on(device)
    return value.to(device) if isinstance(value, Tensor) else value


def call_text(impl: Implementation, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> str:
    """The code of a `check` call with these arguments."""
    parts = [f"load_all()[{impl.op.name!r}][{impl.name!r}]", *map(repr, args)]
    parts += [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"check({', '.join([*parts, f'device={device!r}'])})"


def check(impl: Implementation, *args: Any, device: str = "cpu", **kwargs: Any) -> Any:
    """Run an implementation on inputs (recipes or tensors) and hold the output to the oracle.

    Gives the output (a tensor, or a tuple of them), or None where a stated limit of the
    implementation applies; that is counted in `limits_met` and shown at the end of a test
    run. Raises WrongError for a wrong value, shape, dtype or device.
    """
    call = call_text(impl, args, kwargs, device)
    args = tuple(build(arg, device) for arg in args)
    kwargs = {key: build(value, device) for key, value in kwargs.items()}
    try:
        with poisoned():
            got = impl(*args, **kwargs)
    except LimitError as limit:
        limits_met[str(limit)] += 1
        return None
    judge(impl, got, args, kwargs, call)
    return got


def within_limits(test: Callable[..., None]) -> Callable[..., None]:
    """For a test that calls implementations itself: an example ends where it meets a stated limit.
    That is counted in `limits_met`, as in `check`.
    """

    @functools.wraps(test)
    def body(*args: Any, **kwargs: Any) -> None:
        try:
            test(*args, **kwargs)
        except LimitError as limit:
            limits_met[str(limit)] += 1

    return body


def judge(impl: Implementation, got: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: str) -> None:
    """Hold an output to the op's oracle on these tensors; `check` says what is raised.

    Of an op with several outputs all are tuples: what is got, and what oracle, baseline and magnitude give.
    """
    op = impl.op
    assert op.oracle and op.magnitude and op.reduction, f"{op.name} states no oracle"
    wide = tuple(upcast(arg) for arg in args)
    wide_kwargs = {key: upcast(value) for key, value in kwargs.items()}
    should_be = op.oracle(*wide, **wide_kwargs)
    magnitude = op.magnitude(*wide, **wide_kwargs)
    baseline = op.baseline(*args, **kwargs) if op.baseline else None
    reduction, like = op.reduction(*args, **kwargs), args[0]
    if not isinstance(should_be, tuple):
        _judge_one(impl, got, like, should_be, baseline, magnitude, reduction, call)
        return
    if not isinstance(got, tuple) or len(got) != len(should_be):
        raise WrongError(f"{impl}: got {type(got).__name__}, should be {len(should_be)} tensors; {call}")
    for i, right in enumerate(should_be):
        plain = baseline[i] if baseline else None
        _judge_one(impl, got[i], like, right, plain, magnitude[i], reduction, f"{call}[{i}]")


def _judge_one(
    impl: Implementation,
    got: Tensor,
    like: Tensor,
    should_be: Tensor,
    baseline: Tensor | None,
    magnitude: Tensor,
    reduction: int,
    call: str,
) -> None:
    """One output; it has the dtype and device of `like`."""
    for what, found, right in (
        ("dtype", got.dtype, like.dtype),
        ("device", got.device, like.device),
    ):
        if found != right:
            raise WrongError(
                f"wrong {what} of {impl}\n  got        {found}\n  should be  {right}\n  reproduce  {call}"
            )
    allowed = allowed_error(should_be, baseline, magnitude, like.dtype, reduction)
    try:
        assert_close(got, should_be, allowed, call)
    except WrongError as error:
        raise WrongError(f"{impl}: {error}") from None
