"""Generation with the real weights of SmolLM2-135M-Instruct, read and computed by transformers."""

import copy
import functools

import pytest
import torch

from perf_lab.generate import generate
from perf_lab.model.smollm2 import load_smollm2, why_missing
from perf_lab.pytest_plugin import on_devices

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(why_missing() is not None, reason=str(why_missing())),
]

QUESTIONS = ["The capital of France is", "Once upon a time there was a small village near the sea, where"]
NEW = 16


@functools.cache
def decoder(device: str):
    from perf_lab.model.hugging_face import HuggingFaceDecoder

    return HuggingFaceDecoder(copy.deepcopy(load_smollm2()[0]).to(device))


def ids(text: str, device: str) -> torch.Tensor:
    return load_smollm2()[1](text, return_tensors="pt").input_ids.to(device)


@torch.no_grad()
def missing(device: str, result: torch.Tensor, given: int) -> float:
    """How far the generated tokens' logits lie below the largest, in units of the largest logit,
    by one forward of transformers over the whole result, without any cache."""
    logits = decoder(device).model(result[:, :-1], use_cache=False).logits[0, given - 1 :]
    chosen = logits.gather(1, result[0, given:, None])[:, 0]
    return ((logits.amax(1) - chosen).max() / logits.abs().max()).item()


# Two float32 logits, each wrong by the project's bar of 1e-4 of the largest, change places when this close.
CLOSE = 2e-4


@on_devices()
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_token_is_the_most_likely_of_the_real_model(device, cache, question):
    prompt = ids(question, device)
    result = generate(decoder(device), prompt, NEW, cache=cache)
    assert missing(device, result, prompt.shape[1]) <= CLOSE


@on_devices()
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_cache_does_not_change_the_text(device, question):
    texts = [generate(decoder(device), ids(question, device), NEW, cache=cache) for cache in (True, False)]
    if not torch.equal(*texts):  # then only at a tie within rounding, and both texts are most likely
        first = int((texts[0] != texts[1])[0].nonzero()[0])
        cut = texts[1][:, : first + 1]
        assert missing(device, torch.cat((texts[0][:, :first], cut[:, -1:]), 1), first) <= CLOSE


@on_devices()
def test_the_real_model_writes_what_transformers_writes(device):
    prompt = ids(QUESTIONS[0], device)
    ours = generate(decoder(device), prompt, NEW)
    theirs = decoder(device).model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert load_smollm2()[1].decode(ours[0]) == load_smollm2()[1].decode(theirs[0])
    assert "Paris" in load_smollm2()[1].decode(ours[0])


@on_devices()
def test_rows_of_unequal_length_write_what_they_write_alone(device):
    prompts = [ids(question, device) for question in QUESTIONS]
    longest = max(p.shape[1] for p in prompts)
    padded = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0)) for p in prompts])
    together = generate(decoder(device), padded, NEW, lengths=[p.shape[1] for p in prompts])
    for prompt, row in zip(prompts, together, strict=True):
        result = row[longest - prompt.shape[1] :][None]
        assert torch.equal(result[:, : prompt.shape[1]], prompt)
        assert missing(device, result, prompt.shape[1]) <= CLOSE
