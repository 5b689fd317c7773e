"""What a serving loop must never get wrong: each request gets the tokens that it gets alone."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from perf_lab.generate import generate
from perf_lab.kv_cache import Pool, kv_cache
from perf_lab.kv_cache.prefix import content_hash
from perf_lab.model import ModelConfig, Transformer
from perf_lab.numerics import poisoned
from perf_lab.pytest_plugin import implementations
from perf_lab.serving import Request, serving
from perf_lab.speculative import speculative_generate

from .test_kv_cache import refuses
from .test_model import exact
from .test_paged import constant_hash

VOCAB = 5
CONFIG = ModelConfig(
    vocab_size=VOCAB, layers=2, width=8, heads=2, kv_heads=1, positions="learned", max_length=48
)

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
asks = st.builds(
    lambda prompt, new, arrives: (prompt, new, arrives), prompts, st.integers(1, 8), st.integers(0, 9)
)
seeds = st.integers(0, 5)


@functools.cache
def model(device: str, seed: int = 0, dtype: torch.dtype | None = None) -> Transformer:
    return Transformer.seeded(CONFIG, seed, dtype or exact(device), device).requires_grad_(False)


@functools.cache
def alone(device: str, seed: int, prompt: tuple[int, ...], new: int, eos: int | None = None) -> list[int]:
    """The tokens that a request gets when it is the only one, from a contiguous cache."""
    ids = torch.tensor([prompt], device=device)
    return generate(model(device, seed), ids, new, eos=eos, graph=False)[0, len(prompt) :].tolist()


def pool(device: str, blocks: int = 40, size: int = 4, hasher: Any = content_hash, dtype: Any = None) -> Pool:
    like = {"dtype": dtype or exact(device), "device": device}
    sizes = {"layers": CONFIG.layers, "kv_heads": CONFIG.kv_heads, "head_dim": CONFIG.head_dim}
    with poisoned():
        return Pool(**sizes, blocks=blocks, block_size=size, hasher=hasher, **like)


@dataclass
class Served:
    """Requests that were served, by a server that is still there to be looked at."""

    server: Any
    requests: list[Request]


def serve(server: Any, asked: Sequence[Any], eos: int | None = None, preempted: Sequence[int] = ()) -> Served:
    """Submit each request at the step it arrives at, and go on to the end. At each step preempt one of those
    that run, as `preempted` says, while it lasts.
    """
    requests = [Request(prompt, new, eos) for prompt, new, _ in asked]
    left = sorted(range(len(asked)), key=lambda i: asked[i][2])
    nuisance = iter(preempted)
    for step in range(500):
        while left and asked[left[0]][2] <= step:
            server.submit(requests[left.pop(0)])
        if server.idle and not left:
            return Served(server, requests)
        server.step()
        if server.running and (which := next(nuisance, None)) is not None:
            server._preempt(server.running[which % len(server.running)])
    raise AssertionError(f"not served after 500 steps: {[r for r in requests if not r.done]}")


@implementations(serving)
@given(
    asked=st.lists(asks, min_size=1, max_size=6),
    seed=seeds,
    size=st.integers(1, 5),
    spare=st.integers(0, 12),
    most=st.integers(1, 4),
    chunk=st.integers(1, 9),
    eos=st.none() | st.integers(0, VOCAB - 1),
    hasher=st.sampled_from((content_hash, constant_hash)),
    preempted=st.lists(st.integers(0, 3), max_size=8),
)
def test_each_request_gets_the_tokens_it_gets_alone(
    device, impl, asked, seed, size, spare, most, chunk, eos, hasher, preempted
):
    """In any order of arrival, with shared prefixes, in a pool that may hold little more than one of them."""
    blocks = max(-(-(len(prompt) + new) // size) for prompt, new, _ in asked) + spare
    server = impl.fn(model(device, seed), pool(device, blocks, size, hasher), most=most, chunk=chunk)
    served = serve(server, asked, eos, preempted)
    for request in served.requests:
        should_be = alone(device, seed, request.prompt, request.new, eos)
        assert request.tokens == should_be, f"{request}, should be {should_be}"
    assert server.pool.blocks.used == 0, f"{server.pool.blocks.used} blocks are lost when all are served"


@implementations(serving)
@given(
    asked=st.lists(asks, min_size=2, max_size=6),
    size=st.integers(1, 5),
    spare=st.integers(0, 6),
    chunk=st.integers(1, 9),
)
def test_the_one_that_arrived_first_gets_on_at_every_step(device, impl, asked, size, spare, chunk):
    blocks = max(-(-(len(prompt) + new) // size) for prompt, new, _ in asked) + spare
    server = impl.fn(model(device), pool(device, blocks, size), most=3, chunk=chunk)
    requests = [Request(prompt, new) for prompt, new, _ in asked]
    for request in requests:
        server.submit(request)
    most_steps = sum(len(request.prompt) + request.new for request in requests)
    for _ in range(most_steps):
        first = next((request for request in requests if not request.done), None)
        if first is None:
            return
        before = progress(server, first)
        server.step()
        assert progress(server, first) > before, f"{first} arrived first and stands still"
    assert server.idle, f"not served after {most_steps} steps"


@implementations(serving)
@given(
    seed=seeds,
    size=st.integers(1, 5),
    blocks=st.integers(1, 3),
    off=st.integers(-1, 1),
    new=st.integers(1, 4),
)
def test_a_warm_prompt_gets_the_tokens_of_a_cold_one(device, impl, seed, size, blocks, off, new):
    prompt = tuple(i % 2 for i in range(max(1, blocks * size + off)))
    server = impl.fn(model(device, seed), pool(device, size=size), most=2)
    for expected in (0, (len(prompt) - 1) // size * size):
        (request,) = serve(server, [(prompt, new, 0)]).requests
        assert request.found == expected, f"{request.found} of {len(prompt)} tokens found, block {size}"
        assert request.tokens == alone(device, seed, prompt, new)


@implementations(serving)
@given(asked=st.lists(asks, min_size=1, max_size=5), chunk=st.integers(1, 7), most=st.integers(1, 3))
def test_a_step_computes_no_more_than_it_may(device, impl, asked, chunk, most):
    server = impl.fn(Watched(model(device)), pool(device), most=most, chunk=chunk)
    for prompt, new, _ in asked:
        server.submit(Request(prompt, new))
    while not server.idle:
        server.model.calls = []
        server.step()
        prompt_tokens = sum(columns for _, columns, decoding in server.model.calls if not decoding)
        decoded = [rows for rows, _, decoding in server.model.calls if decoding]
        assert prompt_tokens <= chunk, f"{prompt_tokens} prompt tokens in a step, accepted are {chunk}"
        assert len(decoded) <= 1 and sum(decoded) <= most, f"decode forwards over {decoded} rows"


@implementations(serving)
@given(prompt=prompts, new=st.integers(1, 4))
def test_namespaces_find_nothing_of_each_other(device, impl, prompt, new):
    server = impl.fn(model(device), pool(device, size=2), most=2)
    requests = [Request(prompt, new, namespace=space) for space in ("a", "b", "a")]
    for request in requests:
        server.run([request])
        assert request.tokens == alone(device, 0, prompt, new)
    assert [r.found for r in requests] == [0, 0, (len(prompt) - 1) // 2 * 2]


@implementations(serving)
def test_what_can_never_be_served_is_refused(device, impl):
    server = impl.fn(model(device), pool(device, blocks=3, size=4), most=2)
    for prompt, new in (([0] * 13, 1), ([0] * 6, 8)):
        with refuses(ValueError, naming="request"):
            server.submit(Request(prompt, new))
    for change in ({"prompt": []}, {"prompt": ["a"]}, {"new": 0}, {"new": 1.5}):
        with refuses(ValueError, naming=next(iter(change))):
            Request(**{"prompt": [1], "new": 1, **change})
    for sizes in ({"most": 0}, {"chunk": 0}, {"chunk": 2.0}):
        with refuses(ValueError, naming=next(iter(sizes))):
            impl.fn(model(device), pool(device), **sizes)
    assert server.idle
    server.run([Request([0] * 6, 7)])  # the largest that fits


@implementations(kv_cache)
@given(seed=seeds, prompt=prompts, new=st.integers(1, 12), graph=st.booleans(), size=st.integers(1, 5))
def test_generation_over_every_cache_gives_the_same_tokens(device, impl, seed, prompt, new, graph, size):
    cache = cache_of(impl, device, 1, len(prompt) + new, size)
    ids = torch.tensor([prompt], device=device)
    for known in (0, min(1, len(prompt) - 1)):  # from nothing, and from what the first turn left
        cache.truncate(known)
        result = generate(model(device, seed), ids, new, cache=cache, graph=graph)
        assert result[0, len(prompt) :].tolist() == alone(device, seed, prompt, new)
    assert cache.length == len(prompt) + new - 1


@implementations(kv_cache)
@given(seed=seeds, rows=st.lists(prompts, min_size=1, max_size=3), new=st.integers(1, 6), graph=st.booleans())
def test_padded_rows_over_every_cache_are_as_if_alone(device, impl, seed, rows, new, graph):
    widest = max(map(len, rows))
    cache = cache_of(impl, device, len(rows), widest + new, 3)
    ids = torch.tensor([[0] * (widest - len(row)) + list(row) for row in rows], device=device)
    result = generate(
        model(device, seed), ids, new, cache=cache, lengths=[len(row) for row in rows], graph=graph
    )
    assert result[:, widest:].tolist() == [alone(device, seed, row, new) for row in rows]


@implementations(kv_cache)
@given(
    seed=seeds,
    draft=seeds,
    prompt=prompts,
    new=st.integers(1, 16),
    gamma=st.integers(1, 5),
    size=st.integers(1, 5),
)
def test_speculation_over_every_cache_gives_the_same_tokens(
    device, impl, seed, draft, prompt, new, gamma, size
):
    models = (Over(impl, model(device, which), size) for which in (seed, draft))
    result = speculative_generate(*models, torch.tensor([prompt], device=device), new, gamma=gamma)
    assert result.tokens[0, len(prompt) :].tolist() == alone(device, seed, prompt, new)


@implementations(serving)
@given(asked=st.lists(asks, min_size=1, max_size=4))
def test_the_tokens_of_a_float32_loop_have_the_largest_logits(device, impl, asked):
    """On a CUDA device this is the loop of recorded steps."""
    small = model(device, 1, torch.float32)
    server = impl.fn(small, pool(device, dtype=torch.float32), most=3, chunk=5)
    for request in serve(server, asked).requests:
        whole = torch.tensor([request.known], device=device)
        logits = model(device, 1)(whole[:, :-1])[0, len(request.prompt) - 1 :].cpu()
        chosen = logits.gather(1, whole[0, len(request.prompt) :, None].cpu())[:, 0]
        assert len(chosen) == request.new
        # each logit of float32 within 1e-4 of the largest of its row, as test_model's bar says
        assert (chosen >= logits.amax(1) - 2e-4 * logits.abs().amax(1)).all()


def progress(server: Any, request: Request) -> tuple[int, int]:
    """New tokens, and computed ones."""
    sequences = [job.sequence for job in server.running if job.request is request]
    return len(request.tokens), sum(sequence.length for sequence in sequences)


def cache_of(impl: Any, device: str, batch: int, capacity: int, size: int) -> Any:
    """A cache for the model; of blocks of this size, where there are blocks."""
    blocks = {"block_size": size} if impl.name == "paged" else {}
    sizes = {"layers": CONFIG.layers, "kv_heads": CONFIG.kv_heads, "head_dim": CONFIG.head_dim}
    with poisoned():
        return impl.fn(**sizes, batch=batch, capacity=capacity, dtype=exact(device), device=device, **blocks)


class Over:
    """A model whose caches are of this implementation."""

    def __init__(self, impl: Any, model: Any, size: int) -> None:
        self.impl, self.model, self.config, self.size = impl, model, model.config, size

    def new_cache(self, batch: int, capacity: int) -> Any:
        device = self.model.embedding.weight.device.type
        return cache_of(self.impl, device, batch, capacity, self.size)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class Watched:
    """A model that notes the rows and columns of each forward, and whether it was a decode step."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.calls: list[tuple[int, int, bool]] = []

    def __call__(self, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((*tokens.shape, False))
        return self.model(tokens, *args, **kwargs)

    def step(self, tokens: Any, *args: Any) -> Any:
        self.calls.append((*tokens.shape, True))
        return self.model.step(tokens, *args)
