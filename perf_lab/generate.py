"""Generation: one token after another, each chosen from the model's logits after all before it.

generate(model, prompt, max_new_tokens) gives [B, T + n] int64: the prompt [B, T] and n new tokens.

cache        True: keys and values are kept, and each step computes one token. False: each step computes the
             whole sequence. A cache: it holds the first cache.length < T tokens of the prompt already, and at
             the end all of the result but its last token (which no step has computed).
temperature  below GREEDY_BELOW: the token with the largest logit, the lowest id of equal ones. Otherwise a
             sample of softmax(logits / temperature).
top_k, top_p, min_p, repetition_penalty
             narrow and change the law that is drawn from as perf_lab.sampling defines; a penalty counts for
             greedy too, the others have no say in it. Padding is not seen.
eos          a row that gave it gives nothing else: it is filled up with eos. n < max_new_tokens only when
             every row has ended, and then the last column holds the last row's first eos. Looking for it
             waits for the device once a token; without eos nothing does.
lengths      [B], for prompts of unequal length: row b's prompt is the last lengths[b] tokens of its row, the
             others are left padding: any ids. Each row is as if alone, but for what it draws from the
             generator.
generator    one uniform number a token and row is drawn from it before the first step, on its own device:
             the same seed gives the same numbers everywhere, and eos does not change what is drawn.
progress     called with (new tokens so far, max_new_tokens) after each, as soon as its step is queued.

graph        None: after the prompt the decode step of perf_lab.decode runs, on a CUDA device from a graph,
             where device, model and cache can; False: it never does; True: the same step wherever model and
             cache can, recorded on a CUDA device and run as it is elsewhere. A cache that is given keeps a
             greedy step's graph, so that the next call on it need not record again; it then holds the model.

stream(...), with the same arguments but progress, gives the new tokens [B] one after another.

The model is given T + n - 1 tokens at most, so that must fit in its max_length and the cache's capacity.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from perf_lab.decode import Decode, can_step, pages
from perf_lab.op import Op
from perf_lab.sampling import Chooser, Sampling

generation = Op("generate", reference="loop")


def generate(
    model: Any,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    cache: Any = True,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    generator: torch.Generator | None = None,
    eos: int | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    graph: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The prompt [B, T] and up to max_new_tokens more; the module's docstring is the contract.

    Raises ValueError or TypeError that names the argument, before a cache is touched.
    """
    how = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    tokens, steps = _begin(model, prompt, max_new_tokens, cache, how, generator, eos, lengths, graph)
    last = prompt.shape[1] - 1
    for last in steps:
        if progress is not None:
            progress(last + 1 - prompt.shape[1], max_new_tokens)
    return tokens[:, : last + 1].clone()


def stream(
    model: Any,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    cache: Any = True,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    generator: torch.Generator | None = None,
    eos: int | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    graph: bool | None = None,
) -> Generator[Tensor, None, None]:
    """The new tokens of `generate`, one [B] after another, each as soon as its step is queued.

    Nothing waits for the device but what reads a token, and eos. Raises as `generate` does, at the call and
    not at the first token. One who stops early and closes the stream (or drops it) leaves a given cache with
    all but the last token received.
    """
    how = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    tokens, steps = _begin(model, prompt, max_new_tokens, cache, how, generator, eos, lengths, graph)
    return _columns(tokens, steps)


def _columns(tokens: Tensor, steps: Generator[int, None, None]) -> Generator[Tensor, None, None]:
    with contextlib.closing(steps):
        for at in steps:
            yield tokens[:, at].clone()


def _begin(
    model: Any,
    prompt: Tensor,
    max_new_tokens: int,
    cache: Any,
    how: Sampling,
    generator: torch.Generator | None,
    eos: int | None,
    lengths: Sequence[int] | Tensor | None,
    graph: bool | None,
) -> tuple[Tensor, Generator[int, None, None]]:
    """Check, and make room: the tokens [B, T + max_new_tokens] and the steps that fill them."""
    pads = _check(model, prompt, max_new_tokens, cache, how.top_k, eos, lengths)
    batch, end = prompt.shape[0], prompt.shape[1] + max_new_tokens
    kv = model.new_cache(batch, max(0, end - 1)) if cache is True else None if cache is False else cache
    choose = Chooser(how, prompt, max_new_tokens, model.config.vocab_size, generator, pads)
    decode = None
    if kv is not None and (_pays(kv, prompt) if graph is None else graph) and can_step(model, kv):
        decode = _decode(model, kv, choose, eos, pads, lasts=cache is not True)
        decode.tokens[:, : prompt.shape[1]] = prompt
        tokens = decode.tokens[:, :end]  # [B, T + max_new_tokens]
    else:
        tokens = torch.cat((prompt, prompt.new_empty(batch, max_new_tokens)), 1)
    return tokens, _steps(model, tokens, prompt.shape[1], kv, choose, eos, pads, decode)


def _pays(kv: Any, prompt: Tensor) -> bool:
    """Whether the step is worth it: in a CUDA graph, and on the CPU over memory of one block."""
    return prompt.is_cuda or (prompt.device.type == "cpu" and hasattr(kv, "memory"))


def _decode(
    model: Any, kv: Any, choose: Chooser, eos: int | None, pads: Tensor | None, lasts: bool
) -> Decode:
    """The step over this cache: the one that it keeps of an earlier call, where it lasts and that serves."""
    if not (lasts and not pages(kv) and pads is None and choose.how.greedy and choose.seen is None):
        return Decode(model, kv, choose, pads=pads, eos=eos)
    kept = getattr(kv, "recorded", None)
    if kept is None or not kept.serves(model, eos):
        kept = kv.recorded = Decode(model, kv, choose, eos=eos)
    return kept


@torch.no_grad()
def _steps(
    model: Any,
    tokens: Tensor,
    given: int,
    kv: Any,
    choose: Chooser,
    eos: int | None,
    pads: Tensor | None,
    decode: Decode | None,
) -> Generator[int, None, None]:
    """Fill tokens [B, T + n] from column `given` on; gives each column when it is filled, ends with eos."""
    ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    try:
        for at in range(given, tokens.shape[1]):
            if decode is not None and at > given:
                decode()
            else:
                known = 0 if kv is None else kv.length
                logits = model(tokens[:, known:at], kv, pads=pads, last_only=True)[:, -1]  # [B, V]
                tokens[:, at] = choose(at - given, logits)
                if eos is not None:
                    tokens[:, at].masked_fill_(ended, eos)
                    ended |= tokens[:, at] == eos
                if decode is not None:
                    ended = decode.begin(kv.length, 1, ended)
            yield at
            if eos is not None and bool(ended.all()):
                return
    finally:
        if decode is not None:
            decode.keep()


@generation.register("loop")
def generate_by_loop(model: Any, prompt: Tensor, max_new_tokens: int, **how: Any) -> Tensor:
    """Each step a forward of its own, launched by the host."""
    return generate(model, prompt, max_new_tokens, **{"graph": False, **how})


@generation.register("graph")
def generate_by_graph(model: Any, prompt: Tensor, max_new_tokens: int, **how: Any) -> Tensor:
    """The steps after the first by `perf_lab.decode`, where there is a cache."""
    return generate(model, prompt, max_new_tokens, **{"graph": True, **how})


def _check(
    model: Any,
    prompt: Tensor,
    max_new_tokens: int,
    cache: Any,
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
    _check_room(prompt.shape[0], prompt.shape[1], max_new_tokens, config.max_length, cache)
    low, high = (int(x) for x in torch.stack(prompt.aminmax()))
    if low < 0 or high >= config.vocab_size:
        raise ValueError(f"prompt: got ids from {low} to {high}, accepted are 0 to {config.vocab_size - 1}")
    return None if lengths is None else left_padding(prompt, lengths)


def _check_room(batch: int, given: int, new: int, max_length: int, cache: Any) -> None:
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
    if cache.batch != batch:
        raise ValueError(f"cache: got one of batch {cache.batch}, accepted is the prompt's {batch}")
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


def left_padding(prompt: Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
    """The left padding [B] of prompts [B, T] of so many tokens a row. Raises ValueError naming `lengths`."""
    batch, given = prompt.shape
    rows = torch.as_tensor(lengths)
    if rows.dtype != torch.int64 or rows.shape != (batch,):
        raise ValueError(f"lengths: got {lengths!r}, accepted are {batch} ints, one a row")
    if int(rows.min()) < 1 or int(rows.max()) > given:
        raise ValueError(f"lengths: got {rows.tolist()}, accepted are 1 to {given}, the prompt's columns")
    return (given - rows).to(prompt.device)
