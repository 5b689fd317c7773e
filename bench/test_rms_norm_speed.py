"""What each RMS normalization costs over rows of growing length, with cold caches."""

from perf_lab.pytest_plugin import lengths, timed
from perf_lab.rms_norm import rms_norm
from perf_lab.strategies import Input


@timed(rms_norm)
@lengths(1024, 4096, 8192, 16384)  # the widths of models from small to largest
def test_rms_norm_speed(bench, device, impl, length):
    x = Input((rows(device, length), length), dtype(device))
    bench.op(impl, x, Input((length,), dtype(device), seed=1), device=device)


@timed(rms_norm)
@lengths(4096)  # one token of decoding
def test_rms_norm_of_one_row_speed(bench, device, impl, length):
    x = Input((1, length), dtype(device))
    bench.op(impl, x, Input((length,), dtype(device), seed=1), device=device)


def rows(device: str, length: int) -> int:
    """On a GPU as many rows as columns, which keeps every processor busy, up to 2^26 elements (134 MB
    in bfloat16). On the CPU 2^22 elements at any length: 17 MB in float32, too much for the fast
    caches and still below the size from which malloc maps, and the kernel clears, every result anew.
    """
    return max(1, min(length, 2**26 // length) if device == "cuda" else 2**22 // length)


def dtype(device: str) -> str:
    """What models run in: bfloat16 on a GPU, float32 where bfloat16 is emulated."""
    return "bfloat16" if device == "cuda" else "float32"
