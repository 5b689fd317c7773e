"""What a key/value cache buys: 128 new tokens after a prompt, with and without one, in float32 everywhere.

Without it each step computes the whole sequence again; with it, one token, but then a step is so short that a
GPU may wait for its launches: the table shows from which length on the cache wins, and by how much.
"""

import functools

import pytest
import torch
from torch import Tensor

from perf_lab.generate import generate
from perf_lab.model import ModelConfig, Transformer, cost
from perf_lab.model.smollm2 import load_decoder, why_missing
from perf_lab.op import Cost
from perf_lab.pytest_plugin import lengths, on_devices

NEW = 128  # tokens
REAL_NEW, REAL_PARAMETERS = 16, 135e6
CONFIG = ModelConfig(vocab_size=4096, layers=8, width=512, heads=16)

EFFICIENCY = 0.75  # of the matrix product's rate, for the whole model: what estimates assume
LAUNCHES_S = 16 * CONFIG.layers * 1e-5  # seconds a step: 16 kernels a layer, about 10 us each to start

# Two logits, each wrong by the project's float32 bar of 1e-4 of the largest, change places when this close.
CLOSE = 2e-4


@on_devices()
@pytest.mark.parametrize("impl", ["uncached", "cached"])
@lengths(512, 1024, 2048, 4096)
def test_generate_speed(bench, device, impl, length):
    model, prompt = target(device), random_prompt(length, device)
    cached = impl == "cached"
    total = whole_cost(length, cached)
    seconds = total.flops / (EFFICIENCY * bench.rate(device, torch.float32)) + NEW * LAUNCHES_S
    if cached:  # each step reads all weights
        seconds += NEW * cost(CONFIG, 1, 1, length).bytes / bench.bandwidth(device)

    bench.run(
        lambda: generate(model, prompt, NEW, cache=cached),
        device=device,
        verify=lambda result: verify(model, prompt, result, NEW),
        rehearse=lambda: verify(model, prompt, generate(model, prompt, 2, cache=cached), 2),
        reference="uncached",
        estimate=seconds,
        cost=total,
        info={"tokens": NEW, "cache_bytes": cache_bytes(length) if cached else 0},
    )


@pytest.mark.real_model
@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
@on_devices()
@pytest.mark.parametrize("impl", ["uncached", "cached"])
@lengths(128)
def test_smollm2_generate_speed(bench, device, impl, length):
    """The same with the weights of SmolLM2-135M-Instruct; REAL_NEW tokens."""
    model, prompt = smollm2(device), random_prompt(length, device)
    cached = impl == "cached"
    flops = 2 * REAL_PARAMETERS * (length + REAL_NEW if cached else REAL_NEW * (length + REAL_NEW / 2))
    read = REAL_NEW * 4 * REAL_PARAMETERS / bench.bandwidth(device)  # bytes of float32 weights
    bench.run(
        lambda: generate(model, prompt, REAL_NEW, cache=cached),
        device=device,
        verify=lambda result: verify(model, prompt, result, REAL_NEW),
        reference="uncached",
        estimate=flops / (EFFICIENCY * bench.rate(device, torch.float32)) + read,
        info={"tokens": REAL_NEW},
    )


@torch.no_grad()
def verify(model: Transformer, prompt: Tensor, result: Tensor, new: int) -> None:
    """Each new token is the largest of its logits, as one pass over the whole result gives them."""
    length = prompt.shape[1]
    assert result.shape == (1, length + new), f"got {tuple(result.shape)}, should be {(1, length + new)}"
    assert torch.equal(result[:, :length], prompt), "the result does not begin with the prompt"
    logits = model(result[:, :-1])[0, length - 1 :]  # [new, V]
    missing = logits.amax(1) - logits.gather(1, result[0, length:, None])[:, 0]
    worst, allowed = missing.max().item(), CLOSE * logits.abs().max().item()
    assert worst <= allowed, f"a token's logit is {worst:.3g} below the largest, allowed are {allowed:.3g}"


def whole_cost(length: int, cached: bool) -> Cost:
    """All steps' FLOPs. Bytes: those of the last step, since a machine whose own cache holds all weights
    reads them once.
    """
    later = range(length + 1, length + NEW)  # tokens that the steps after the first see
    steps = [cost(CONFIG, 1, length)]
    steps += [cost(CONFIG, 1, 1, seen - 1) if cached else cost(CONFIG, 1, seen) for seen in later]
    return Cost(sum(step.flops for step in steps), steps[-1].bytes)


def cache_bytes(length: int) -> int:
    """Bytes of keys and values of a prompt and the new tokens that are given to the model."""
    return Transformer(CONFIG, device="meta").new_cache(1, length + NEW - 1).nbytes


smollm2 = functools.cache(load_decoder)


@functools.cache
def target(device: str) -> Transformer:
    """The model, with the same random weights on every device."""
    return Transformer.seeded(CONFIG, seed=0, device=device).requires_grad_(False)


@functools.cache
def random_prompt(length: int, device: str) -> Tensor:
    """Random ids [1, length], the same on every device."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(CONFIG.vocab_size, (1, length), generator=generator).to(device)
