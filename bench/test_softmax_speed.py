"""What each softmax costs over rows of growing length, with cold caches."""

from perf_lab.pytest_plugin import lengths, timed
from perf_lab.softmax import softmax
from perf_lab.strategies import Input


@timed(softmax)
@lengths(1024, 4096, 8192, 16384, 262144)  # rows in registers, and the logits of a large vocabulary
def test_softmax_speed(bench, device, impl, length):
    bench.op(impl, Input((rows(device, length), length), dtype(device)), device=device)


@timed(softmax)
@lengths(4096)  # one query's scores
def test_softmax_of_one_row_speed(bench, device, impl, length):
    bench.op(impl, Input((1, length), dtype(device)), device=device)


@timed(softmax)
@lengths(131072, 262144)  # the vocabularies of today's models
def test_softmax_of_logits_speed(bench, device, impl, length):
    batch = 128 if device == "cuda" else 16  # sequences decoded together
    bench.op(impl, Input((batch, length), dtype(device)), device=device)


def rows(device: str, length: int) -> int:
    """On a GPU as many rows as columns, which keeps every processor busy, up to 2^26 elements (134 MB
    in bfloat16). On the CPU 2^22 elements at any length: 17 MB in float32, too much for the fast
    caches and still below the size from which malloc maps, and the kernel clears, every result anew.
    """
    return max(1, min(length, 2**26 // length) if device == "cuda" else 2**22 // length)


def dtype(device: str) -> str:
    """What models run in: bfloat16 on a GPU, float32 where bfloat16 is emulated."""
    return "bfloat16" if device == "cuda" else "float32"
