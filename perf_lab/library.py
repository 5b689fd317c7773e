"""A kernel as an operator of torch, so that compiled programs may call it.

`torch.compile` cannot look into a launch. A registered operator it takes as a
whole: a fake implementation tells it the results' shapes. A plain call does not
go through the dispatcher, whose Python would cost more than the launch.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def operator(name: str, fake: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as torch.ops.perf_lab.<name>; compiled programs call that.

    The function changes no input and gives no view of one; its annotations are the schema.
    fake: the same signature, gives uninitialized results of the right shape, dtype and device.
    What is given back has the registered operator as its attribute `operator`.
    """

    def register(fn: Callable[P, R]) -> Callable[P, R]:
        registered: Any = torch.library.custom_op(f"perf_lab::{name}", fn, mutates_args=())
        registered.register_fake(fake)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return registered(*args, **kwargs)
            return fn(*args, **kwargs)

        call.operator = registered  # type: ignore[attr-defined]
        return call

    return register
