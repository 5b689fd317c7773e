"""Speculative against plain decoding, each row with the cost model's prediction from measured costs.

The table's ratio is the measured speed-up; `predicted` is perf_lab.speculative.cost_model's for the agreement
that the run had, `draft_cost` and `verify_cost` (of a forward over gamma + 1 tokens) in steps of the target;
`planned_gamma` is what perf_lab.speculative.planner would take, 0 where speculation does not pay.

test_speculative_speed   a target of 6 layers x 256 and a draft of its first 2, both trained to count, so that
                         the draft is always right; and a draft that nobody trained, which gives nothing
test_synthetic_...       models of Qwen2.5's shapes with random weights. Their tokens are forced by a script,
                         which the draft follows with the chance a. Costs are real, acceptance is SYNTHETIC.
test_smollm2_...         SmolLM2-135M-Instruct on a text: real acceptance, beside transformers' own ways
"""

import copy
import functools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from perf_lab.generate import generate
from perf_lab.measure.clock import WallTimer, device_timer
from perf_lab.model import ModelConfig, Transformer, cost
from perf_lab.model.counting import counting, counting_pair
from perf_lab.model.smollm2 import load_decoder, load_smollm2, why_missing
from perf_lab.pytest_plugin import lengths, on_devices
from perf_lab.speculative import (
    Costs,
    PromptLookup,
    Result,
    first_layers,
    measured_costs,
    plan,
    quantized_copy,
    speculative_generate,
)
from perf_lab.speculative.recorded import Span

PROMPT = 16  # tokens
GAMMAS = (1, 2, 4, 8)  # measured for the planner

COUNTING = {"gamma2": 2, "gamma4": 4, "gamma8": 8, "gamma4_untrained": 4}


@on_devices()
@pytest.mark.parametrize("impl", ["greedy", *COUNTING])
@lengths(128)
def test_speculative_speed(bench, device, impl, length):
    target, trained = counting_pair(device)
    draft = untrained(device) if impl == "gamma4_untrained" else trained
    prompt = counting_prompt(device)
    should_be = counting(250, PROMPT + length, 256).to(device)

    greedy = kept(target, prompt, length)

    def speculate():
        return speculative_generate(target, draft, prompt, length, gamma=COUNTING[impl])

    def verify(result):
        tokens = result.tokens if isinstance(result, Result) else result
        assert torch.equal(tokens, should_be), f"got {tokens.tolist()}, should be {should_be.tolist()}"
        assert draft is not trained or impl == "greedy" or result.acceptance == 1.0

    costs = costs_of(target, draft, prompt)
    bench.run(
        greedy if impl == "greedy" else speculate,
        device=device,
        verify=verify,
        reference="greedy",
        estimate=length * costs.step,
        info={"tokens": length, **({} if impl == "greedy" else expected(speculate(), COUNTING[impl], costs))},
    )


def kept(target: Any, prompt: Tensor, new: int) -> Callable[[], Tensor]:
    """Greedy decoding over one cache again and again, so that its graph too is recorded once."""
    cache = target.new_cache(1, prompt.shape[1] + new)

    def work() -> Tensor:
        cache.reset()
        return generate(target, prompt, new, cache=cache)

    return work


def expected(result: Result, gamma: int, costs: Costs) -> dict[str, float]:
    """What the rounds were, and the speed-up that they should give at the measured costs."""
    return {
        "tokens_per_target_forward": result.tokens_per_target_forward,
        "acceptance": result.acceptance,
        "agreement": result.agreement,
        "draft_cost": costs.draft / costs.step,
        "verify_cost": costs.verify[gamma] / costs.step,
        "predicted": costs.speedup(result.agreement, gamma),
        "planned_gamma": plan(result.agreement, costs).gamma,
    }


@functools.cache
def counting_prompt(device: str) -> Tensor:
    return counting(250, PROMPT, 256).to(device)


@functools.cache
def untrained(device: str) -> Transformer:
    """A draft of the trained one's size, with random weights."""
    config = ModelConfig(vocab_size=256, layers=2, width=256, heads=4)
    return Transformer.seeded(config, seed=1, device=device)


@functools.lru_cache(maxsize=8)
def costs_of(target: Any, draft: Any, prompt: Tensor) -> Costs:
    """Seconds of one step of each and of verifications, as decoding runs them here: on a GPU from a graph."""
    if prompt.is_cuda:
        step, *verify = (recorded_seconds(target, prompt, width) for width in (1, *(g + 1 for g in GAMMAS)))
        own = 0.0 if draft is None else recorded_seconds(draft, prompt, 1)
        return Costs(step, own, dict(zip(GAMMAS, verify, strict=True)))
    return measured_costs(target, draft, prompt, GAMMAS, wall_seconds)


def wall_seconds(work: Callable[[], Any], device: str) -> float:
    """The median of 3 to 20 rounds of some 20 ms or one call."""
    first = WallTimer([work], device).round()
    first = min(first, WallTimer([work], device).round())
    timer = WallTimer([work], device, repeat=max(1, round(0.02 / first)))
    return statistics.median(timer.round() for _ in range(max(3, min(20, round(0.5 / first)))))


@torch.no_grad()
def recorded_seconds(model: Any, prompt: Tensor, width: int) -> float:
    """Of one forward over `width` tokens behind the prompt and its choice, replayed from a graph."""
    length = prompt.shape[1]
    cache = model.new_cache(1, length + width)
    model(prompt, cache, last_only=True)
    cache.reset()  # the host's length bounds what may be written; where, the ladder says
    tokens = torch.nn.functional.pad(prompt, (0, width))
    ladder = torch.arange(length, length + width + 1, device=prompt.device)
    span = Span(cache, ladder[:1], width)

    def work() -> Tensor:
        return span.read(model, tokens, ladder, 0).argmax(-1)

    for _ in range(3):  # kernels are compiled, and do not count
        work()
    timer = device_timer([work], prompt.device.type)
    timer.round()
    return statistics.median(timer.round() for _ in range(10))


# --- synthetic acceptance on models of Qwen2.5's shapes ---

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"layers": 24, "width": 896, "heads": 14, "kv_heads": 2, "mlp_width": 4864, "vocab_size": 151936},
    "1.5B": {
        "layers": 28,
        "width": 1536,
        "heads": 12,
        "kv_heads": 2,
        "mlp_width": 8960,
        "vocab_size": 151936,
    },
    "7B": {"layers": 28, "width": 3584, "heads": 28, "kv_heads": 4, "mlp_width": 18944, "vocab_size": 152064},
}
VOCAB = 151936  # ids that all of them have
SYNTHETIC = {f"a{a}": a for a in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)}
GAMMA, NEW = 4, 128


@on_devices("cpu", "cuda")
@pytest.mark.parametrize("impl", ["greedy", *SYNTHETIC])
@pytest.mark.parametrize("size", ["1.5B", "7B"])
@lengths(512)
def test_synthetic_acceptance_speed(bench, device, impl, size, length):
    seconds = NEW * cost(config(size), 1, 1, length, itemsize=2).bytes / bench.bandwidth(device)
    if device != "cuda":
        pytest.skip(f"{size} in bfloat16 is for a GPU: one call would take {seconds:.0f} s here at the least")
    script, prompt, target = forced(size, device, length)
    draft = Forced(random_model("0.5B", device), wrong_at_times(script, SYNTHETIC.get(impl, 1.0)).to(device))
    should_be = script[None, : length + NEW].to(device)

    def speculate():
        return speculative_generate(target, draft, prompt, NEW, gamma=GAMMA)

    def verify(result):
        tokens = result.tokens if isinstance(result, Result) else result
        assert torch.equal(tokens, should_be), "the forced tokens did not come"

    costs = costs_of(target.model, draft.model, prompt)
    bench.run(
        kept(target, prompt, NEW) if impl == "greedy" else speculate,
        device=device,
        verify=verify,
        reference="greedy",
        estimate=2 * seconds,
        dtype=torch.bfloat16,
        rounds=3,
        info={
            "tokens": NEW,
            "acceptance_is": "synthetic",
            **({} if impl == "greedy" else expected(speculate(), GAMMA, costs)),
        },
    )


@functools.lru_cache(maxsize=1)
def forced(size: str, device: str, length: int) -> tuple[Tensor, Tensor, "Forced"]:
    """A script of random ids, on the CPU; its beginning as a prompt; a target that follows it."""
    script = torch.randint(VOCAB, (length + NEW + GAMMA + 2,), generator=torch.Generator().manual_seed(0))
    target = Forced(random_model(size, device), script.to(device))
    return script, script[None, :length].to(device), target


class Forced(torch.nn.Module):
    """A model that does its work and then says what the script [C] says: script[i + 1] after place i."""

    def __init__(self, model: Transformer, script: Tensor) -> None:
        super().__init__()
        self.model, self.config, self.new_cache = model, model.config, model.new_cache
        self.register_buffer("script", script)

    def forward(self, tokens: Tensor, cache: Any, *, last_only: bool = False, **how: Any) -> Tensor:
        """Logits [1, T or 1, V]."""
        places = torch.arange(cache.length, cache.length + tokens.shape[1], device=tokens.device)
        logits = self.model(tokens, cache, last_only=last_only, **how)
        return self._forced(logits, places[-logits.shape[1] :])

    def step(self, tokens: Tensor, slots: Any, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Likewise, in the form that a graph holds."""
        return self._forced(self.model.step(tokens, slots, positions, mask), positions)

    def _forced(self, logits: Tensor, places: Tensor) -> Tensor:
        said = self.script.index_select(0, places.flatten() + 1).view(*logits.shape[:2], 1)
        return logits.scatter_(-1, said, 1e4)


def wrong_at_times(script: Tensor, right: float) -> Tensor:
    """The script with each id kept with this chance, and another one put in its place otherwise."""
    kept = torch.rand(len(script), generator=torch.Generator().manual_seed(1)) < right
    return torch.where(kept, script, (script + 1) % VOCAB)


def config(size: str) -> ModelConfig:
    tied = size != "7B"
    return ModelConfig(
        **SHAPES[size], mlp="swiglu", qkv_bias=True, tie_embeddings=tied, rope_theta=1e6, max_length=4096
    )


@functools.lru_cache(maxsize=2)
def random_model(size: str, device: str) -> Transformer:
    """Weights as torch.nn draws them, on the device: the lab's seeded ones take minutes."""
    torch.manual_seed(0)
    return Transformer(config(size), dtype=torch.bfloat16, device=device).requires_grad_(False)


# --- real acceptance, on the real model ---

TEXT = (
    "One, two, buckle my shoe. Three, four, knock at the door. Five, six, pick up sticks. "
    "One, two, buckle my shoe. Three, four,"
)
REAL_NEW = 16

# gamma and the draft of each way; transformers' are given the same
REAL = {
    "lookup": (4, lambda target: PromptLookup()),
    "first_layers": (2, lambda target: first_layers(target, 20)),
    "int8_copy": (2, lambda target: quantized_copy(target, "int8", skip="head")),
}
THEIRS = {"transformers": None, "transformers_lookup": "lookup", "transformers_first_layers": "first_layers"}

# Two logits, each wrong by the project's float32 bar of 1e-4 of the largest, change places when this close.
CLOSE = 2e-4


@pytest.mark.real_model
@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
@on_devices("cpu")
@pytest.mark.parametrize("impl", ["greedy", *REAL, *THEIRS])
@lengths(len(TEXT.split()))
def test_smollm2_speculative_speed(bench, device, impl, length):
    target, prompt = smollm2(), text_ids()
    works: dict[str, Any] = {"greedy": kept(target, prompt, REAL_NEW)}
    info: dict[str, Any] = {"tokens": REAL_NEW}
    if impl in REAL:
        gamma, draft = REAL[impl][0], real_draft(impl)
        works[impl] = lambda: speculative_generate(target, draft, prompt, REAL_NEW, gamma=gamma)
        model = None if impl == "lookup" else draft
        info |= expected(works[impl](), gamma, costs_of(target, model, prompt))
    elif impl in THEIRS:
        works[impl] = functools.partial(by_transformers, THEIRS[impl], prompt)
    bench.run(
        works[impl],
        device=device,
        verify=lambda result: verify_real(result.tokens if isinstance(result, Result) else result, prompt),
        reference="greedy",
        estimate=6 * REAL_NEW * cost(target.config, 1, 1, prompt.shape[1]).bytes / bench.bandwidth(device),
        rounds=1,
        info=info,
    )


@torch.no_grad()
def by_transformers(way: str | None, prompt: Tensor) -> Tensor:
    """The generate of transformers: plain, with prompt look-up, or assisted by its first layers."""
    how: dict[str, Any] = {}
    if way == "lookup":
        how = {"prompt_lookup_num_tokens": REAL["lookup"][0]}
    elif way == "first_layers":
        how = {"assistant_model": their_first_layers()}
    return load_smollm2()[0].generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=REAL_NEW,
        min_new_tokens=REAL_NEW,
        do_sample=False,
        **how,
    )


@functools.cache
def their_first_layers() -> Any:
    """The model of transformers cut to as many layers as our draft, its weights shared."""
    gamma, ours = REAL["first_layers"][0], real_draft("first_layers")
    whole = load_smollm2()[0]
    short = copy.copy(whole)
    short.config = copy.deepcopy(whole.config)
    short.config.num_hidden_layers = ours.config.layers  # its forward takes so many of the layers
    short._modules = {**whole._modules, "model": copy.copy(whole.model)}
    short.model.config = short.config
    short.generation_config = copy.deepcopy(whole.generation_config)
    short.generation_config.num_assistant_tokens = gamma
    short.generation_config.num_assistant_tokens_schedule = "constant"
    short.generation_config.assistant_confidence_threshold = 0.0
    return short


@torch.no_grad()
def verify_real(tokens: Tensor, prompt: Tensor) -> None:
    """Every new token is the most likely one within rounding, by one forward of the target over all."""
    given = prompt.shape[1]
    assert tokens.shape[1] == given + REAL_NEW
    logits = smollm2()(tokens[:, :-1])[0, given - 1 :]
    missing = logits.amax(1) - logits.gather(1, tokens[0, given:, None])[:, 0]
    assert missing.max() <= CLOSE * logits.abs().max(), (
        f"token {int(missing.argmax())} is not the most likely"
    )


smollm2 = functools.cache(load_decoder)


@functools.cache
def text_ids() -> Tensor:
    return load_smollm2()[1](TEXT, return_tensors="pt").input_ids


@functools.cache
def real_draft(impl: str) -> Any:
    return REAL[impl][1](smollm2())
