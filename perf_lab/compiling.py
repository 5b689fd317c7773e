"""What the implementations by torch.compile share: kernels in a bounded number, and what they need.

A call of OWN_KERNEL elements or more gets a kernel for its very shape, as
torch.compile makes by default: a benchmark then compares with the best that it
can do (with sizes unknown, a CPU kernel can take twice as long, and on a GPU
loads of 16 bytes cannot be proven aligned). All smaller calls share a kernel
that takes any sizes, 0 and 1 included.

`fullgraph` makes dynamo raise when it would compile a function for the ninth
time, where it otherwise runs it uncompiled from then on without a word.
"""

import functools
import os
import shutil
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perf_lab.op import Limit

OWN_KERNEL = 2**18  # elements; below, a call takes microseconds whatever the kernel
MOST_KERNELS = 128  # the ones used last are kept
LONGEST_ON_CPU = 16384  # columns


@functools.lru_cache(maxsize=MOST_KERNELS)
def kernel(function: Any, static: bool, *key: Hashable) -> Callable[..., Tensor]:
    """`function` compiled for one key: device, dtypes and, where `static`, sizes.

    Its code object is its own, because dynamo counts and limits compilations by code object.
    """
    fresh = types.FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(fresh, fullgraph=True, dynamic=False if static else None)


def as_rows(x: Tensor, *shape: int, static: bool) -> Tensor:
    """The contiguous x in this shape. No view: dynamo would guard its base. Not `static`: sizes unknown."""
    x = x.contiguous()
    strides = (shape[1], 1) if len(shape) == 2 else (1,)
    x = x.as_strided(shape, strides).data
    if not static:
        torch._dynamo.decorators.mark_unbacked(x, list(range(len(shape))))
    return x


@functools.cache
def _no_compiler() -> bool:
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return not (shutil.which(compiler) and headers.exists())


def _long_on_cpu(x: Tensor, *_: Any, **__: Any) -> bool:
    return x.device.type == "cpu" and x.dtype is torch.float32 and x.shape[-1] > LONGEST_ON_CPU


LIMITS = (
    Limit(
        "on cpu, torch.compile needs a C++ compiler and Python's C headers, which are not here",
        lambda x, *_, **__: x.device.type == "cpu" and _no_compiler(),
    ),
    Limit(
        "on cpu, torch.compile's kernel adds the terms of a row one after the other in each vector lane: "
        f"past {LONGEST_ON_CPU} columns of float32 its error leaves the gate (5 times that at 262144)",
        _long_on_cpu,
    ),
)
