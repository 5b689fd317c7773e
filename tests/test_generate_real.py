"""Generation with the real weights of SmolLM2-135M-Instruct, in the lab's decoder, judged by transformers."""

import functools

import pytest
import torch

from perf_lab.generate import generate
from perf_lab.model.smollm2 import load_decoder, load_smollm2, why_missing
from perf_lab.pytest_plugin import on_devices

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(why_missing() is not None, reason=str(why_missing())),
]

QUESTIONS = ["The capital of France is", "Once upon a time there was a small village near the sea, where"]
NEW = 16


decoder = functools.cache(load_decoder)


def ids(text: str, device: str) -> torch.Tensor:
    return load_smollm2()[1](text, return_tensors="pt").input_ids.to(device)


@torch.no_grad()
def missing(result: torch.Tensor, given: int) -> float:
    """How far the generated tokens' logits lie below the largest, in units of the largest logit,
    by one forward of transformers over the whole result, without any cache."""
    result = result.cpu()
    logits = load_smollm2()[0](result[:, :-1], use_cache=False).logits[0, given - 1 :]
    chosen = logits.gather(1, result[0, given:, None])[:, 0]
    return ((logits.amax(1) - chosen).max() / logits.abs().max()).item()


# Two float32 logits, each wrong by the project's bar of 1e-4 of the largest, change places when this close.
CLOSE = 2e-4


@on_devices()
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_logits_are_those_of_transformers(device, question):
    tokens = ids(question, device)
    with torch.no_grad():
        should_be = load_smollm2()[0](tokens.cpu()).logits
    assert (decoder(device)(tokens).cpu() - should_be).abs().max() <= CLOSE / 2 * should_be.abs().max()


@on_devices()
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_token_is_the_most_likely_of_the_real_model(device, cache, question):
    prompt = ids(question, device)
    result = generate(decoder(device), prompt, NEW, cache=cache)
    assert missing(result, prompt.shape[1]) <= CLOSE


@on_devices()
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_cache_does_not_change_the_text(device, question):
    texts = [generate(decoder(device), ids(question, device), NEW, cache=cache) for cache in (True, False)]
    if not torch.equal(*texts):  # then only at a tie within rounding, and both texts are most likely
        first = int((texts[0] != texts[1])[0].nonzero()[0])
        cut = texts[1][:, : first + 1]
        assert missing(torch.cat((texts[0][:, :first], cut[:, -1:]), 1), first) <= CLOSE


@on_devices()
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_real_model_writes_what_transformers_writes(device, question):
    prompt = ids(question, device)
    ours = generate(decoder(device), prompt, NEW).cpu()
    theirs = load_smollm2()[0].generate(prompt.cpu(), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    if not torch.equal(ours, theirs):  # then only at a tie within rounding
        first = int((ours != theirs)[0].nonzero()[0])
        assert (
            missing(ours[:, : first + 1], first) <= CLOSE and missing(theirs[:, : first + 1], first) <= CLOSE
        )


@on_devices()
def test_the_real_model_answers_and_ends(device):
    tokenizer = load_smollm2()[1]
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt = ids(text, device)
    result = generate(decoder(device), prompt, 2 * NEW, eos=tokenizer.eos_token_id)
    text = tokenizer.decode(result[0, prompt.shape[1] :])
    assert "Paris" in text and text.endswith(tokenizer.eos_token)


@on_devices()
def test_rows_of_unequal_length_write_what_they_write_alone(device):
    prompts = [ids(question, device) for question in QUESTIONS]
    longest = max(p.shape[1] for p in prompts)
    padded = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0)) for p in prompts])
    together = generate(decoder(device), padded, NEW, lengths=[p.shape[1] for p in prompts])
    for prompt, row in zip(prompts, together, strict=True):
        result = row[longest - prompt.shape[1] :][None]
        assert torch.equal(result[:, : prompt.shape[1]], prompt)
        assert missing(result, prompt.shape[1]) <= CLOSE
