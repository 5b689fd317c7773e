"""What quantizing a real model, SmolLM2-135M-Instruct, must never get wrong."""

import copy
import functools
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

from perf_lab.model.smollm2 import load_smollm2, why_missing
from perf_lab.pytest_plugin import on_devices
from perf_lab.quant import QuantizedLinear, quantize_

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(why_missing() is not None, reason=str(why_missing())),
]

PROMPT = "The capital of France is"
TEXT = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees. The capital of "
    "Italy is Rome. Once upon a time there was a small village near the sea, where people lived from fishing."
)
each_format = pytest.mark.parametrize("format", ["int8", "nf4"])


@functools.cache
def float_model(device: str) -> nn.Module:
    return load_smollm2()[0].to(device) if device == "cpu" else copy.deepcopy(load_smollm2()[0]).to(device)


@functools.cache
def quantized(device: str, format: str) -> nn.Module:
    return quantize_(copy.deepcopy(float_model(device)), format, skip="lm_head")


@functools.cache
def scratch(device: str) -> nn.Module:
    """A float model whose linear weights the tests overwrite."""
    return copy.deepcopy(float_model(device))


def linears(device: str, format: str) -> list[tuple[str, Tensor, QuantizedLinear]]:
    """Path, float weight and quantized layer of each Linear that was replaced."""
    return [
        (path, float_model(device).get_submodule(path).weight.detach(), layer)
        for path, layer in quantized(device, format).named_modules()
        if isinstance(layer, QuantizedLinear)
    ]


def absmax(w: Tensor, format: str) -> Tensor:
    """The largest magnitude in each row, or in each block of 64, which divides every width here."""
    return torch.linalg.vector_norm(w.view(-1, w.shape[-1] if format == "int8" else 64), torch.inf, 1, True)


def tokens(text: str, device: str) -> Tensor:
    return load_smollm2()[1](text, return_tensors="pt").input_ids.to(device)


@torch.no_grad()
def logits(model: nn.Module, device: str) -> Tensor:
    """For TEXT, in float64 and less their mean, which no probability depends on: [tokens, vocabulary]."""
    x = model(tokens(TEXT, device)).logits[0].cpu().double()
    return x - x.mean(-1, keepdim=True)


@functools.cache
def float_logits(device: str) -> Tensor:
    return logits(float_model(device), device)


def sentence(model: nn.Module, device: str) -> str:
    """PROMPT and what transformers' greedy generation adds to it."""
    ids = tokens(PROMPT, device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    return load_smollm2()[1].decode(out[0])


@on_devices()
@each_format
def test_every_real_weight_is_within_the_bound(device, format, record_property):
    # the last factor: the error and its ratio to absmax are rounded here, each to a float32
    bound = {"int8": 1 / 254 + 2**-23, "nf4": 0.1519036 + 3 * 2**-24}[format] * (1 + 2**-22)
    errors = defaultdict(list)
    for path, w, layer in linears(device, format):
        error = layer.weight - w
        worst = (absmax(error, format) / absmax(w, format)).max()
        assert worst <= bound, f"{path}: an error of {worst} times absmax, allowed are {bound}"
        errors[path.rpartition(".")[2]].append((error.norm() / w.norm()).item())
    assert sum(map(len, errors.values())) == 210  # 7 in each of 30 layers
    for kind, found in errors.items():
        record_property(f"{format} {kind}", f"{sum(found) / len(found):.4%}, most {max(found):.4%}")


@on_devices()
@each_format
def test_a_real_model_takes_the_bytes_of_its_formats(device, format):
    stored = {
        "int8": lambda out, inner: out * inner + 4 * out,
        "nf4": lambda out, inner: out * inner * 36 // 64,
    }
    saved = sum(w.nbytes - stored[format](*w.shape) for _, w, _ in linears(device, format))
    assert nbytes(quantized(device, format)) == nbytes(float_model(device)) - saved


def nbytes(model: nn.Module) -> int:
    """Bytes of all storages, each counted once."""
    storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@on_devices()
@each_format
@torch.no_grad()
def test_a_real_model_generates_what_its_decoded_weights_generate(device, format):
    for path, _, layer in linears(device, format):
        scratch(device).get_submodule(path).weight.copy_(layer.weight)
    got = sentence(quantized(device, format), device)
    assert got == sentence(scratch(device), device)
    assert torch.equal(logits(quantized(device, format), device), logits(scratch(device), device))
    assert got.startswith("The capital of France is Paris.")


@on_devices()
@each_format
@torch.no_grad()
def test_a_real_model_loses_what_noise_of_the_formats_size_costs(device, format):
    """The format's rounding errors move the logits as far as random errors of their size do. Cutting
    codes off, instead of rounding, doubles the errors: the limit lies midway between.
    """
    generator = torch.Generator().manual_seed(0)
    for path, w, _ in linears(device, format):
        scratch(device).get_submodule(path).weight.copy_(w + noise(w, format, generator))
    right = float_logits(device)
    got, random = ((logits(m, device) - right).norm() for m in (quantized(device, format), scratch(device)))
    assert 0 < got <= 2**0.5 * random


def noise(w: Tensor, format: str, g: torch.Generator) -> Tensor:
    """int8: uniform within a step, absmax / 127. nf4: normal, of 9.20% of its block's size."""
    if format == "int8":
        return (torch.rand(w.shape, generator=g).to(w) - 0.5) * absmax(w, format) / 127
    size = w.view(-1, 64).square().mean(1, keepdim=True).sqrt()
    return (0.0920 * size * torch.randn(len(size), 64, generator=g).to(w)).view(w.shape)


@on_devices()
def test_the_tied_head_of_a_real_model_is_refused_by_both_names(device):
    model = copy.deepcopy(float_model(device))
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight and lm_head\.weight"):
        quantize_(model, "int8")
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
