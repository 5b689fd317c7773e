"""What residual addition and RMS normalization cost, fused and as two calls, with cold caches."""

from perf_lab.add_rms_norm import add_rms_norm
from perf_lab.pytest_plugin import lengths, timed
from perf_lab.strategies import Input


@timed(add_rms_norm)
@lengths(1024, 4096, 8192, 16384)  # the widths of models from small to largest
def test_add_rms_norm_speed(bench, device, impl, length):
    run(bench, device, impl, rows(device, length), length)


@timed(add_rms_norm)
@lengths(4096)  # one token of decoding
def test_add_rms_norm_of_one_row_speed(bench, device, impl, length):
    run(bench, device, impl, 1, length)


def run(bench, device, impl, rows, length):
    """Time one implementation on [rows, length]."""
    shape = (rows, length)
    x, residual = Input(shape, dtype(device)), Input(shape, dtype(device), seed=1)
    bench.op(impl, x, residual, Input((length,), dtype(device), seed=2), device=device)


def rows(device: str, length: int) -> int:
    """As for rms_norm: on a GPU as many rows as columns up to 2^26 elements, on the CPU 2^22 elements."""
    return max(1, min(length, 2**26 // length) if device == "cuda" else 2**22 // length)


def dtype(device: str) -> str:
    """What models run in: bfloat16 on a GPU, float32 where bfloat16 is emulated."""
    return "bfloat16" if device == "cuda" else "float32"
