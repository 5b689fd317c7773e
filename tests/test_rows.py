"""What kernels over rows must never get wrong between one and the next."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perf_lab.add_rms_norm import add_rms_norm
from perf_lab.pytest_plugin import on_devices
from perf_lab.rms_norm import rms_norm
from perf_lab.softmax import softmax
from perf_lab.strategies import Input


def chain(x: Tensor, weight: Tensor, between: Callable[[], None]) -> list[Tensor]:
    """Each kernel reads what the one before it wrote; their short rows leave processors free early."""
    results = [x]
    for _ in range(8):
        y = rms_norm["triton"].fn(results[-1], weight)
        between()
        y, s = add_rms_norm["triton"].fn(y, results[-1], weight)
        between()
        results += [softmax["triton"].fn(s), y]
        between()
    return results


@on_devices("cuda")
@pytest.mark.parametrize("shape", [(1, 4096), (300, 1024), (4096, 4096), (100, 40000)], ids=str)
def test_a_kernel_that_starts_early_waits_for_what_it_reads(device, shape):
    x, weight = Input(shape, "bfloat16").on(device), Input(shape[-1:], "bfloat16", 1).on(device)
    slow = chain(x, weight, torch.cuda.synchronize)
    fast = chain(x, weight, lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(slow, fast, strict=True))
