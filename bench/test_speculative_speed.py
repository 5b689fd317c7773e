"""Speculative against plain decoding: a target of 6 layers x 256 and a draft of its first 2, both trained to
count, so that the draft is always right; and a draft that nobody trained, which costs time and gives nothing.

The table's ratio is the measured speed-up; `predicted` is the cost model's, from measured costs of one step.
"""

import functools
import statistics

import pytest
import torch

from perf_lab.generate import generate
from perf_lab.measure.clock import WallTimer
from perf_lab.model import ModelConfig, Transformer
from perf_lab.model.counting import counting, counting_pair
from perf_lab.pytest_plugin import lengths, on_devices
from perf_lab.speculative import Result, predicted_speedup, speculative_generate

PROMPT = 16  # tokens

GAMMAS = {"gamma2": 2, "gamma4": 4, "gamma8": 8, "gamma4_untrained": 4}


@on_devices()
@pytest.mark.parametrize("impl", ["greedy", *GAMMAS])
@lengths(128, 256)
def test_speculative_speed(bench, device, impl, length):
    target, trained = counting_pair(device)
    draft = untrained(device) if impl == "gamma4_untrained" else trained
    prompt = counting(250, PROMPT, 256).to(device)
    should_be = counting(250, PROMPT + length, 256).to(device)

    def greedy():
        return generate(target, prompt, length)

    def speculate():
        return speculative_generate(target, draft, prompt, length, gamma=GAMMAS[impl])

    def verify(result):
        tokens = result.tokens if isinstance(result, Result) else result
        assert torch.equal(tokens, should_be), f"got {tokens.tolist()}, should be {should_be.tolist()}"
        assert draft is not trained or impl == "greedy" or result.acceptance == 1.0

    expected = {} if impl == "greedy" else expectation(speculate(), GAMMAS[impl], draft, device)
    bench.run(
        greedy if impl == "greedy" else speculate,
        device=device,
        verify=verify,
        reference="greedy",
        estimate=length * step_seconds(target, device),
        info={"tokens": length, **expected},
    )


def expectation(result: Result, gamma: int, draft: Transformer, device: str) -> dict[str, float]:
    """What the rounds were, and the speed-up that they should give at the measured cost of a draft step."""
    cost = step_seconds(draft, device) / step_seconds(counting_pair(device)[0], device)
    return {
        "tokens_per_target_forward": result.tokens_per_target_forward,
        "acceptance": result.acceptance,
        "draft_cost": cost,
        "predicted": predicted_speedup(result.agreement, gamma, cost),
    }


@functools.cache
def untrained(device: str) -> Transformer:
    """A draft of the trained one's size, with random weights."""
    config = ModelConfig(vocab_size=256, layers=2, width=256, heads=4)
    return Transformer.seeded(config, seed=1, device=device)


@functools.cache
def step_seconds(model: Transformer, device: str) -> float:
    """Seconds of decoding one token after PROMPT others: the median of 20 rounds of 5."""
    cache = model.new_cache(1, PROMPT + 1)
    tokens = counting(0, PROMPT + 1, 256).to(device)

    @torch.no_grad()
    def step():
        cache.truncate(PROMPT)
        model(tokens[:, PROMPT:], cache, last_only=True).argmax(-1)

    with torch.no_grad():
        model(tokens[:, :PROMPT], cache)
    timer = WallTimer([step], device, repeat=5)
    timer.round()  # the first is cold
    return statistics.median(timer.round() for _ in range(20))
