"""Decoding one sequence with the lab's decoder and with transformers' own generate, from the same weights.

On the CPU SmolLM2-135M-Instruct in float32; on the GPU models of Qwen2.5's shapes with random weights in
bfloat16, after a prompt of 512 tokens. `transformers_static` is its static cache, whose forward transformers
compiles as it sees fit. limit_tokens_per_s: what the memory allows, weights and cache read once a token.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from perf_lab.generate import generate
from perf_lab.model import Transformer, cost
from perf_lab.model.load import from_hugging_face
from perf_lab.model.smollm2 import load_decoder, load_smollm2, why_missing
from perf_lab.pytest_plugin import lengths, on_devices

NEW = {"cpu": 32, "cuda": 128}  # tokens

# How far, in units of the largest logit, a right token's logit may lie below it: two logits that are each off
# by the float32 bar of 1e-4; in bfloat16, by eps (2^-8) times the root of the 57 branches that were added.
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 2 * 2**-8 * 57**0.5}

SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.real_model
@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
@on_devices("cpu")
@pytest.mark.parametrize("impl", ["transformers", "ours"])
@lengths(16)
def test_smollm2_decode_speed(bench, device, impl, length):
    timed_decode(bench, device, impl, length, load_smollm2()[0], smollm2())


@on_devices("cuda")
@pytest.mark.parametrize("impl", ["transformers", "transformers_static", "ours"])
@pytest.mark.parametrize("size", list(SHAPES))
@lengths(512)
def test_qwen2_shaped_decode_speed(bench, device, impl, size, length):
    pytest.importorskip("transformers", reason="needs the package transformers")
    # about 20 ms a token in transformers' loop: one round of that
    rounds = 1 if impl == "transformers" else 2
    timed_decode(bench, device, impl, length, *qwen2_shaped(size, device), rounds=rounds)


def timed_decode(
    bench: Any,
    device: str,
    impl: str,
    length: int,
    theirs: Any,
    ours: Transformer,
    rounds: int | None = None,
) -> None:
    new, weight = NEW[device], ours.embedding.weight
    prompt = random_prompt(length, ours.config.vocab_size, device)
    mask, endless = torch.ones_like(prompt), without_end(theirs)
    how = {"cache_implementation": "static"} if impl == "transformers_static" else {}
    kept = ours.new_cache(1, length + new - 1)  # with its recorded step, as their static cache is kept

    def by_transformers(new: int = new) -> Tensor:
        return endless.generate(
            prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **how
        )

    def by_us() -> Tensor:
        kept.reset()
        return generate(ours, prompt, new, cache=kept)

    def rehearse() -> None:
        verify(theirs, prompt, by_transformers(2), 2)

    token = cost(ours.config, 1, 1, length + new // 2, weight.itemsize).bytes  # to read for one in the middle
    bench.run(
        by_us if impl == "ours" else by_transformers,
        device=device,
        verify=lambda result: verify(theirs, prompt, result, new),
        rehearse=rehearse if impl == "transformers" else None,
        reference="transformers",
        estimate=4 * new * token / bench.bandwidth(device),
        dtype=weight.dtype,
        rounds=rounds,
        info={"tokens": new, "limit_tokens_per_s": bench.bandwidth(device) / token},
    )


@torch.no_grad()
def verify(theirs: Any, prompt: Tensor, result: Tensor, new: int) -> None:
    """Each new token is the most likely one, as transformers sees it in one pass over the whole result."""
    length = prompt.shape[1]
    assert result.shape == (1, length + new), f"got {tuple(result.shape)}, should be {(1, length + new)}"
    assert torch.equal(result[:, :length], prompt), "the result does not begin with the prompt"
    logits = theirs(result[:, :-1], use_cache=False, logits_to_keep=new).logits[0]  # [new, V]
    missing = logits.amax(1) - logits.gather(1, result[0, length:, None])[:, 0]
    worst, allowed = missing.max().item(), CLOSE[logits.dtype] * logits.abs().max().item()
    assert worst <= allowed, f"a token's logit is {worst:.3g} below the largest, allowed are {allowed:.3g}"


def without_end(model: Any) -> Any:
    """The same model, but its generate goes on after an end of text, as ours does."""
    endless = copy.copy(model)  # the weights are shared
    endless.generation_config = copy.deepcopy(model.generation_config)
    endless.generation_config.eos_token_id = None
    return endless


smollm2 = functools.cache(load_decoder)


@functools.lru_cache(maxsize=1)
def qwen2_shaped(size: str, device: str) -> tuple[Any, Transformer]:
    """A transformers model of this shape with random weights, drawn on the device, and the lab's copy."""
    import transformers

    config = transformers.Qwen2Config(
        num_hidden_layers=28, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **SHAPES[size]
    )
    with torch.device(device):
        torch.manual_seed(0)
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return theirs, from_hugging_face(theirs)


@functools.cache
def random_prompt(length: int, vocab_size: int, device: str) -> Tensor:
    """Random ids [1, length], the same on every device."""
    return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(length)).to(device)
