"""Generation: one token after another, each chosen from the model's logits after all before it.

generate(model, prompt, max_new_tokens) gives [B, T + n] int64: the prompt [B, T] and n new tokens.

cache        True: keys and values are kept, and each step computes one token. False: each step computes the
             whole sequence. A cache: it holds the first cache.length < T tokens of the prompt already, and at
             the end all of the result but its last token (which no step has computed).
temperature  below GREEDY_BELOW: the token with the largest logit, the lowest id of equal ones. Otherwise a
             sample of softmax(logits / temperature), of the top_k largest logits only if that is given.
eos          a row that gave it gives nothing else: it is filled up with eos. n < max_new_tokens only when
             every row has ended, and then the last column holds the last row's first eos. Looking for it
             waits for the device once a token; without eos nothing does.
lengths      [B], for prompts of unequal length: row b's prompt is the last lengths[b] tokens of its row, the
             others are left padding: any ids. Each row is as if alone, but for what it draws from the
             generator.
generator    one uniform number a token and row is drawn from it before the first step, on its own device:
             the same seed gives the same numbers everywhere, and eos does not change what is drawn.

graph        None: after the prompt the decode step runs from a CUDA graph (perf_lab.decode), where device,
             model and cache can; False: it never does; True: the same step wherever model and cache can,
             recorded on a CUDA device and run as it is elsewhere.

The model is given T + n - 1 tokens at most, so that must fit in its max_length and the cache's capacity.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from perf_lab.decode import Decode, can_step
from perf_lab.op import Op

GREEDY_BELOW = torch.finfo(torch.float32).tiny
"""1.2e-38: the least temperature whose reciprocal is finite, in every dtype from bfloat16 on.
Down to it, a sample is a sample; below, it is its limit."""

generation = Op("generate", reference="loop")


@torch.no_grad()
def generate(
    model: Any,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    cache: Any = True,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    eos: int | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    graph: bool | None = None,
) -> Tensor:
    """The prompt [B, T] and up to max_new_tokens more; the module's docstring is the contract.

    Raises ValueError or TypeError that names the argument, before a cache is touched.
    """
    pads = _check(model, prompt, max_new_tokens, cache, temperature, top_k, eos, lengths)
    batch, given = prompt.shape
    end = given + max_new_tokens
    kv = model.new_cache(batch, max(0, end - 1)) if cache is True else None if cache is False else cache
    choose = chooser(batch, max_new_tokens, temperature, top_k, generator, prompt.device)
    tokens = torch.cat((prompt, prompt.new_empty(batch, max_new_tokens)), 1)  # [B, T + max_new_tokens]
    ended = torch.zeros(batch, dtype=torch.bool, device=prompt.device)
    wanted = prompt.is_cuda if graph is None else graph
    decode: Decode | None = None
    for at in range(given, end):
        if decode is not None:
            decode()
        else:
            known = 0 if kv is None else kv.length
            logits = model(tokens[:, known:at], kv, pads=pads, last_only=True)[:, -1]  # [B, V]
            tokens[:, at] = choose(at - given, logits)
            if eos is not None:
                tokens[:, at].masked_fill_(ended, eos)
                ended |= tokens[:, at] == eos
            if wanted and can_step(model, kv):
                decode = Decode(model, kv, tokens, choose, step=1, pads=pads, eos=eos, ended=ended)
        if eos is not None and bool(ended.all()):
            tokens = tokens[:, : at + 1]
            break
    if decode is not None:
        decode.keep()
    return tokens


@generation.register("loop")
def generate_by_loop(model: Any, prompt: Tensor, max_new_tokens: int, **how: Any) -> Tensor:
    """Each step a forward of its own, launched by the host."""
    return generate(model, prompt, max_new_tokens, **{"graph": False, **how})


@generation.register("graph")
def generate_by_graph(model: Any, prompt: Tensor, max_new_tokens: int, **how: Any) -> Tensor:
    """The steps after the first by `perf_lab.decode`, where there is a cache."""
    return generate(model, prompt, max_new_tokens, **{"graph": True, **how})


def chooser(
    batch: int,
    steps: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    device: torch.device,
) -> Callable[[int | Tensor, Tensor], Tensor]:
    """The function (step, logits [B, V]) -> tokens [B] that chooses as these arguments of `generate` say.
    The step is a number, or a tensor [1] that the host need not know.
    """
    if temperature < GREEDY_BELOW:
        return lambda step, logits: logits.argmax(-1)
    source = generator.device if generator is not None else "cpu"
    uniform = torch.rand(steps, batch, 1, generator=generator, device=source).to(device)

    def choose(step: int | Tensor, logits: Tensor) -> Tensor:
        drawn = uniform[step] if isinstance(step, int) else uniform.index_select(0, step)[0]  # [B, 1]
        return pick(probabilities(logits, temperature, top_k), drawn)

    return choose


def law(logits: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    """The oracle of `probabilities`: the definition, one row at a time, in the float64 of its argument."""
    rows = logits.reshape(-1, logits.shape[-1])
    out = torch.zeros_like(rows)
    for row, result in zip(rows, out, strict=True):
        kept = sorted(range(len(row)), key=lambda i: (-row[i].item(), i))[:top_k]
        weights = torch.exp((row[kept] - row[kept[0]]) / temperature)
        result[kept] = weights / weights.sum()
    return out.view_as(logits)


def law_magnitude(logits: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    """With z = (logits - max) / temperature: p (1 + |z| + sum p |z|). An exponential has the relative error
    of its own rounding and the absolute one of its exponent, and so has the sum that it is divided by.
    """
    p = law(logits, temperature, top_k)
    z = ((logits - logits.amax(-1, keepdim=True)) / temperature).abs()
    return p * (1 + z + (p * z).sum(-1, keepdim=True))


sampling = Op(
    "sampling",
    oracle=law,
    magnitude=law_magnitude,
    reduction=lambda logits, temperature, top_k=None: logits.shape[-1],
    reference="softmax",
)


@sampling.register("softmax")
def probabilities(logits: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    """softmax(logits / temperature) over the last axis of logits [..., V], in float32 at the least.

    top_k keeps exactly the k largest logits, of equal ones the lower ids, and gives the others 0.
    temperature >= GREEDY_BELOW; the largest logit is subtracted before the division, so that 0 / temperature
    is what the largest becomes and nothing overflows to NaN.
    """
    logits = logits if logits.dtype is torch.float64 else logits.float()
    if top_k is not None and top_k < logits.shape[-1]:
        dropped = logits.argsort(dim=-1, descending=True, stable=True)[..., top_k:]
        logits = logits.scatter(-1, dropped, -math.inf)
    return torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)


def pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The token in whose share of [0, 1) the number lies: probabilities [..., V], uniform [..., 1] -> [...].

    The shares lie in the order of the ids; a token of probability 0 has none. Each share is right within the
    rounding of the running sum, V * 2^-24 at most.
    """
    edges = probabilities.cumsum(-1)
    target = uniform.to(edges) * edges[..., -1:]
    return torch.searchsorted(edges, target, right=True).squeeze(-1).clamp(max=edges.shape[-1] - 1)


def _check(
    model: Any,
    prompt: Tensor,
    max_new_tokens: int,
    cache: Any,
    temperature: float,
    top_k: int | None,
    eos: int | None,
    lengths: Sequence[int] | Tensor | None,
) -> Tensor | None:
    """Raise for what the contract refuses; gives the left padding [B] of the rows, None without lengths."""
    config = model.config
    if not isinstance(prompt, Tensor) or prompt.dtype != torch.int64:
        got = prompt.dtype if isinstance(prompt, Tensor) else type(prompt).__name__
        raise TypeError(f"prompt: got {got}, accepted is a Tensor of torch.int64")
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(f"prompt: got shape {tuple(prompt.shape)}, accepted is [B, T], neither of them 0")
    _check_int("max_new_tokens", max_new_tokens, 0, None)
    if top_k is not None:
        _check_int("top_k", top_k, 1, config.vocab_size)
    if eos is not None:
        _check_int("eos", eos, 0, config.vocab_size - 1)
    if not (isinstance(temperature, int | float) and math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature: got {temperature!r}, accepted are finite numbers from 0 on")
    _check_room(prompt.shape[1], max_new_tokens, config.max_length, cache)
    low, high = (int(x) for x in torch.stack(prompt.aminmax()))
    if low < 0 or high >= config.vocab_size:
        raise ValueError(f"prompt: got ids from {low} to {high}, accepted are 0 to {config.vocab_size - 1}")
    return None if lengths is None else _pads(prompt, lengths)


def _check_room(given: int, new: int, max_length: int, cache: Any) -> None:
    steps = given + new - 1
    if new and steps > max_length:
        raise ValueError(
            f"max_new_tokens: got {new} after a prompt of {given}, accepted are at most "
            f"{max(0, max_length + 1 - given)}: the model takes {max_length} tokens (max_length)"
        )
    if isinstance(cache, bool):
        return
    if not hasattr(cache, "append"):
        raise TypeError(f"cache: got {type(cache).__name__}, accepted are True, False and a cache")
    if new and cache.length >= given:
        raise ValueError(
            f"cache: got one of {cache.length} tokens, accepted are fewer than the prompt's {given}"
        )
    if new and steps > cache.capacity:
        raise ValueError(f"cache: got one of capacity {cache.capacity}, accepted are {steps} and above")


def _check_int(name: str, got: int, least: int, most: int | None) -> None:
    if not isinstance(got, int) or isinstance(got, bool):
        raise TypeError(f"{name}: got {got!r}, accepted is an int")
    if got < least or (most is not None and got > most):
        raise ValueError(
            f"{name}: got {got}, accepted are {least}{' and above' if most is None else f' to {most}'}"
        )


def _pads(prompt: Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
    batch, given = prompt.shape
    rows = torch.as_tensor(lengths)
    if rows.dtype != torch.int64 or rows.shape != (batch,):
        raise ValueError(f"lengths: got {lengths!r}, accepted are {batch} ints, one a row")
    if int(rows.min()) < 1 or int(rows.max()) > given:
        raise ValueError(f"lengths: got {rows.tolist()}, accepted are 1 to {given}, the prompt's columns")
    return (given - rows).to(prompt.device)
