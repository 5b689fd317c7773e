"""RMS normalization by torch.compile.

How many kernels are compiled is bounded. A call of OWN_KERNEL elements or more
gets one for its very shape and eps, as torch.compile makes by default: a benchmark
then compares with the best that it can do (with sizes unknown, loads of 16 bytes
cannot be proven aligned on a GPU). All smaller calls of one pair of dtypes share a
kernel that takes any eps and any sizes, 0 and 1 included.

`fullgraph` makes dynamo raise when it would compile a function for the ninth
time, where it otherwise runs it uncompiled from then on without a word.
"""

import functools
import os
import shutil
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from perf_lab.op import Limit
from perf_lab.rms_norm import cast_once, rms_norm

OWN_KERNEL = 2**18  # elements; below, a call takes microseconds whatever the kernel
MOST_KERNELS = 64  # the ones used last are kept
LONGEST_ON_CPU = 16384  # columns

Key = tuple[int, int, float]  # rows, columns, eps


@functools.lru_cache(maxsize=MOST_KERNELS)
def _kernel(
    device: torch.device, dtype: torch.dtype, weight: torch.dtype, key: Key | None
) -> Callable[..., Tensor]:
    """The compiled function of one shape and eps, or (None) of all. Its code object is its own,
    because dynamo counts and limits compilations by code object.
    """
    fresh = types.FunctionType(cast_once.__code__.replace(), cast_once.__globals__)
    return torch.compile(fresh, fullgraph=True, dynamic=False if key else None)


@functools.cache
def _no_compiler() -> bool:
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return not (shutil.which(compiler) and headers.exists())


LIMITS = (
    Limit(
        "on cpu, torch.compile needs a C++ compiler and Python's C headers, which are not here",
        lambda x, *_, **__: x.device.type == "cpu" and _no_compiler(),
    ),
    Limit(
        "on cpu, torch.compile's kernel adds the terms of a row one after the other in each vector lane: "
        f"past {LONGEST_ON_CPU} columns of float32 its error leaves the gate (5 times that at 262144)",
        lambda x, *_, **__: (
            x.device.type == "cpu" and x.dtype is torch.float32 and x.shape[-1] > LONGEST_ON_CPU
        ),
    ),
)


@rms_norm.register("compiled", devices=("cpu", "cuda"), limits=LIMITS)
@torch.no_grad()  # one state of autograd, so one kernel
def compiled_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last axis of x [..., C] with weight [C]; what is strided is copied first."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    flat = x.contiguous()
    flat = flat.as_strided((rows, columns), (columns, 1)).data  # [R, C]; no view: dynamo would guard its base
    weight = weight.contiguous()
    weight = weight.as_strided((columns,), (1,)).data
    own = x.numel() >= OWN_KERNEL
    if not own:
        torch._dynamo.decorators.mark_unbacked(flat, [0, 1])
        torch._dynamo.decorators.mark_unbacked(weight, 0)
    kernel = _kernel(x.device, x.dtype, weight.dtype, (rows, columns, eps) if own else None)
    return kernel(flat, weight, eps).view(x.shape)
