"""What a quantized weight costs and saves: a Linear in bfloat16 against the same with its weight in
int8 or nf4, dequantized and then multiplied. Bytes of the weight, how many times smaller than float32,
and the relative error |w - stored| / |w| (Frobenius) stand in tables of their own.

Dequantizing writes the whole 16-bit weight before it is multiplied, so these lose time for the memory
that they save, most of it with few rows; what wins both reads the codes inside the product.
"""

import copy
import functools
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from perf_lab.measure.ceilings import cache_bytes
from perf_lab.model.smollm2 import load_smollm2, why_missing
from perf_lab.op import OPS, Implementation
from perf_lab.pytest_plugin import lengths, on_devices
from perf_lab.quant import Quantized, QuantizedLinear, quantized_linear
from perf_lab.strategies import Input

COLD = 8  # caches full of weights, as many as the bandwidth ceiling is measured on
IMPLS = ["bf16", "int8", "nf4"]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@on_devices()
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows", [1, 16])
@lengths(1024, 2048, 4096)
def test_quantized_linear_speed(bench, device, impl, rows, length):
    """A square weight of normal numbers, length x length."""
    layer, error = stored(impl, Input((length, length)).on())
    measure(bench, impl, layer, rows, device, error)


@pytest.mark.real_model
@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
@on_devices()
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("weights", LAYERS)
@lengths(1)
def test_smollm2_linear_speed(bench, device, impl, weights, length):
    """The middle layer of SmolLM2-135M-Instruct, for `length` tokens; the error is the mean of all 30."""
    layers = smollm2_layers(impl, weights)
    measure(bench, impl, layers[15][0], length, device, sum(error for _, error in layers) / len(layers))


def stored(impl: str, w: Tensor) -> tuple[nn.Module, float]:
    """A Linear that holds w as `impl` says, and the relative error of what it holds."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(w, requires_grad=False)
    layer = layer.bfloat16() if impl == "bf16" else QuantizedLinear.from_linear(layer, impl)
    return layer, ((layer.weight - w).norm() / w.norm()).item()


@functools.cache
def smollm2_layers(impl: str, name: str) -> list[tuple[nn.Module, float]]:
    """What `stored` makes of the 30 weights of this name."""
    named = load_smollm2()[0].named_parameters()
    return [stored(impl, w.detach()) for path, w in named if path.endswith(f"{name}.weight")]


def measure(bench, impl: str, layer: nn.Module, rows: int, device: str, error: float) -> None:
    """Time copies of the layer in turn, each of them cold, and hold them to the decoded weight's product."""
    q = layer.stored if impl != "bf16" else as_stored(layer.weight)
    weight = layer.weight.float() if impl == "bf16" else OPS[impl].oracle(q).float()  # rounded by 2^-24
    op = copy.copy(quantized_linear)
    op.reference, op.cost = "bf16", lambda x, weight: quantized_linear.cost(x, q)
    copies = math.ceil(COLD * cache_bytes(device) / q.nbytes)
    turn = itertools.cycle([copy.deepcopy(layer).to(device) for _ in range(copies)])
    one_of_them = Implementation(op, impl, lambda x, weight: next(turn)(x), (device,), (torch.bfloat16,))
    sizes = {"weight_bytes": q.nbytes, "times_smaller": 4 * weight.numel() / q.nbytes}
    x = Input((rows, q.shape[1]), "bfloat16")
    bench.op(one_of_them, x, weight, device=device, info={**sizes, "relative_error": error})


def as_stored(weight: Tensor) -> Quantized:
    """A 16-bit weight in the form of a quantized one: its numbers are its codes."""
    return Quantized(weight, weight.new_empty(0), "bfloat16", tuple(weight.shape), weight.dtype)
