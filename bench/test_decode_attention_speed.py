"""One token's attention over the keys of a long sequence, cold: k and v are read once, and that is all.

Bytes decide, so `fraction_of_ceiling` is that of memory. The default kernel of torch is the reference.
"""

import copy
import dataclasses

import pytest
import torch

from perf_lab.attention import attention
from perf_lab.pytest_plugin import lengths, timed
from perf_lab.strategies import Kept

HEADS, KV_HEADS, D = 32, 8, 128
MOST_KEYS = 2**17  # of all rows: 512 MiB of keys and values; the CPU draws them in seconds
CAPACITY = 65536  # keys of a buffer that is not full

decoding = timed(attention, on=("cuda",), only=lambda impl: impl.name not in ("naive", "chunked", "flex"))


@decoding
@pytest.mark.parametrize("rows", [1, 32])
@lengths(4096, 16384, 65536)
def test_decode_attention_speed(bench, device, impl, rows, length):
    if rows * length > MOST_KEYS:
        pytest.skip(f"{rows * length} keys: above {MOST_KEYS} the CPU draws the inputs for most of a minute")
    bench.op(compared_with_sdpa(impl), *qkv(rows, length), device=device, causal=True)


@decoding
@lengths(4096, 65536)
def test_decode_in_a_buffer_speed(bench, device, impl, length):
    """Of CAPACITY keys `length` exist, as the device knows: cost should follow them, not the room."""
    counts = torch.tensor([length], dtype=torch.int32)
    bench.op(compared_with_sdpa(impl), *qkv(1, CAPACITY), device=device, causal=True, lengths=counts)


def qkv(rows, length):
    shapes = (rows, HEADS, 1, D), *2 * ((rows, KV_HEADS, length, D),)
    return [Kept(shape, "bfloat16", seed) for seed, shape in enumerate(shapes)]


def compared_with_sdpa(impl):
    op = copy.copy(impl.op)
    op.reference = "sdpa"
    return dataclasses.replace(impl, op=op)
