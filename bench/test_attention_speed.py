"""Attention over one sequence: all scores at once, tile by tile, and fused kernels.

All do about the same multiplications. The naive one writes and reads its length^2 scores several
times, which is what it loses by; tile by tile they stay in the cache, but the loop over tiles is Python's.
What sets the fused ones apart is how busy they keep the tensor cores.
"""

import copy
import dataclasses
import math

import pytest

from perf_lab.attention import attention
from perf_lab.measure.clock import WallTimer
from perf_lab.pytest_plugin import lengths, timed
from perf_lab.strategies import Input, Kept

B, H, D = 1, 8, 64
BLOCK = 64  # queries
HEADS = 32  # of the prefill
FOR_OTHER_SHAPES = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "split")
CALLS = 12  # of a row at the least: check, warm up, first and three more rounds, all on two copies; memory


@timed(attention, only=lambda impl: impl.name not in FOR_OTHER_SHAPES)
@lengths(512, 1024, 2048, 4096, 8192)
def test_attention_speed(bench, device, impl, length):
    dtype = "float32" if device == "cpu" else "bfloat16"
    seconds = seconds_a_call(impl, device, dtype, length)
    if CALLS * seconds > bench.limit_s:
        pytest.skip(
            f"the {CALLS} calls of this row would take about {seconds:.2g} s each here, "
            f"{CALLS * seconds:.0f} s together, above {bench.limit_s:g} s (--longest)"
        )
    judged = dataclasses.replace(impl, op=judged_in_blocks(attention))
    bench.op(judged, *qkv(dtype, length), device=device, estimate=seconds, causal=True)


@timed(attention, on=("cuda",), only=lambda impl: impl.name not in ("naive", "chunked", "sdpa", "split"))
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@lengths(2048, 8192, 16384)
def test_prefill_speed(bench, device, impl, head_dim, causal, length):
    judged = dataclasses.replace(impl, op=judged_in_blocks(attention))
    judged.op.reference = "sdpa_flash"
    drawn = [Kept((B, HEADS, length, head_dim), "bfloat16", seed) for seed in range(3)]
    bench.op(judged, *drawn, device=device, causal=causal)


def qkv(dtype, length):
    return [Input((B, H, length, D), dtype, seed) for seed in range(3)]


def seconds_a_call(impl, device, dtype, length):
    """16 times what a call takes at a quarter of the length."""
    short = [x.on(device) for x in qkv(dtype, max(1, length // 4))]
    timer = WallTimer([lambda: impl(*short, causal=True)], device)
    timer.round()  # compiles
    return 16 * timer.round()


def judged_in_blocks(op):
    """The op, held to its oracle in the first, middle and last BLOCK queries of a square call, and everywhere
    else only to be finite: the float64 oracle of all 8192^2 pairs takes half a minute on 2 cores.
    """
    judged = copy.copy(op)
    judged.oracle = _in_blocks(op.oracle, elsewhere=0.0)
    judged.baseline = _in_blocks(op.baseline, elsewhere=0.0)
    judged.magnitude = _in_blocks(op.magnitude, elsewhere=math.inf)  # which allows any finite error
    return judged


def _in_blocks(compute, elsewhere):
    def computed(q, k, v, *, causal=False, **how):
        out = q.new_full((*q.shape[:3], v.shape[3]), elsewhere)
        last = max(0, q.shape[2] - BLOCK)
        for start in {0, last // 2, last}:
            rows, stop = slice(start, start + BLOCK), start + BLOCK if causal else k.shape[2]
            out[:, :, rows] = compute(q[:, :, rows], k[:, :, :stop], v[:, :, :stop], causal=causal, **how)
        return out

    return computed
