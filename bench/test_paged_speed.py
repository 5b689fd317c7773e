"""What blocks cost and what they buy: decoding through block tables against a cache in one piece, memory at
ragged lengths, the time to the first token after a prefix that is there, and a serving loop over it all.

The blocks of every pool here lie in random order, as after hours of serving.
"""

import copy
import functools
import itertools
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from perf_lab.attention import attention
from perf_lab.decode import Decode, Slots, record
from perf_lab.generate import generate
from perf_lab.kv_cache import ContiguousCache, PagedCache, Pool, Rows
from perf_lab.measure.bench import COLD
from perf_lab.measure.ceilings import cache_bytes
from perf_lab.model import ModelConfig, Transformer, cost
from perf_lab.numerics import judge
from perf_lab.op import Cost
from perf_lab.pytest_plugin import lengths, on_devices
from perf_lab.serving import Request, Server

BLOCK = 16  # tokens, unless a row says another number
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16, "mps": torch.float32}

# -- decoding: one token for each row of a batch, in every layer --------------------------------------------

STEPS = 16  # of a whole model
LAYERS = {"cpu": 1, "cuda": 4, "mps": 1}  # on a GPU enough that launching a graph is nothing
HEADS = {
    "cpu": (8, 2, 32),
    "cuda": (32, 8, 128),
    "mps": (8, 2, 32),
}  # queries, keys, size: 8B models have cuda's


@on_devices()
@pytest.mark.parametrize("impl", ["contiguous", "paged_1", "paged_16", "paged_256"])
@pytest.mark.parametrize("batch", [1, 32])
@lengths(1024, 4096)
def test_paged_decode_speed(bench, device, impl, batch, length):
    """Write a token and attend to all: what a layer's cache does in a decode step of `batch` rows."""
    if batch == 1 and impl in ("paged_1", "paged_256"):
        pytest.skip("block sizes are told apart at batch 32")
    if device == "cpu" and batch * length > 2**16:
        pytest.skip("a minute of copying on a CPU, and the shorter rows say the same")
    cache, (q, k, v) = filled(impl, device, batch, length), new_tokens(device, batch)
    at = torch.full((1,), length, device=device)
    slots = cache.slots(at) if isinstance(cache, PagedCache) else Slots(cache, at)
    slots.seen = (at + 1).expand(batch)

    def step() -> Tensor:
        for layer in range(LAYERS[device]):
            y = slots.attend(layer, q, k, v, window=None, mask=None)
        return y

    keys, values = (torch.cat(pair, 2) for pair in zip(past(device, batch, length), (k, v), strict=True))
    one, layers = attention.cost(q, keys, values), LAYERS[device]
    total = Cost(layers * one.flops, layers * one.bytes)
    bench.run(
        replayed(step) if device == "cuda" else step,
        device=device,
        verify=lambda y: judge(
            attention["naive"], y[:2], (q[:2], keys[:2], values[:2]), {}, "the first rows"
        ),
        reference="contiguous",
        dtype=DTYPE[device],
        cost=total if total.bytes > COLD * cache_bytes(device) else None,  # else read from the cache
        info={"tokens": batch, "cache_bytes": cache.nbytes},
    )


def filled(impl: str, device: str, batch: int, length: int) -> Any:
    """A cache of so many tokens a row with room for one more, equal in every layer."""
    _, kv_heads, dim = HEADS[device]
    how: dict[str, Any] = {"layers": LAYERS[device], "batch": batch, "kv_heads": kv_heads, "head_dim": dim}
    how |= {"capacity": length + 1, "dtype": DTYPE[device], "device": device}
    if impl == "contiguous":
        cache: Any = ContiguousCache(**how)
    else:
        cache = PagedCache(**how, block_size=int(impl.removeprefix("paged_")))
        random.Random(0).shuffle(cache.pool.blocks.free)
    for layer in range(LAYERS[device]):
        cache.append(layer, *past(device, batch, length))
    cache.commit(length)
    return cache


@functools.lru_cache(maxsize=1)
def past(device: str, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, length, D]."""
    _, kv_heads, dim = HEADS[device]
    return normal(0, (batch, kv_heads, length, dim), device), normal(
        1, (batch, kv_heads, length, dim), device
    )


def new_tokens(device: str, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of one token a row."""
    heads, kv_heads, dim = HEADS[device]
    return tuple(normal(i, (batch, h, 1, dim), device) for i, h in ((2, heads), (3, kv_heads), (4, kv_heads)))


def normal(seed: int, shape: tuple[int, ...], device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=DTYPE[device])


def replayed(work: Any) -> Any:
    """The work as one graph: a call replays it and gives the tensor that it left its result in."""
    work()
    results = []
    graph = record(lambda: results.append(work()))
    return lambda: (graph.replay(), results[0])[1]


@on_devices("cuda")
@pytest.mark.parametrize("impl", ["contiguous", "paged"])
@pytest.mark.parametrize("batch", [32])
@lengths(1024)
@torch.no_grad()
def test_paged_step_speed(bench, device, impl, batch, length):
    """The whole decode step of a 1B model from its graph: STEPS tokens of each row after `length` others."""
    pytest.importorskip("transformers", reason="needs the package transformers")
    _, model = llama(device)
    how = {
        "layers": model.config.layers,
        "kv_heads": model.config.kv_heads,
        "head_dim": model.config.head_dim,
    }
    how |= {"batch": batch, "capacity": length + STEPS, "dtype": DTYPE[device], "device": device}
    cache = ContiguousCache(**how) if impl == "contiguous" else PagedCache(**how, block_size=BLOCK)
    if isinstance(cache, PagedCache):
        random.Random(0).shuffle(cache.pool.blocks.free)
    prompt = torch.tensor([ids(length + 1, i, model.config.vocab_size) for i in range(batch)], device=device)
    for start in range(0, length, 256):
        model(prompt[:, start : min(start + 256, length)], cache, last_only=True)
    decode = Decode(model, cache, lambda step, logits: logits.argmax(-1))
    decode.tokens[:, : length + 1] = prompt

    def steps() -> Tensor:
        decode.begin(length, 0, decode.ended)
        for _ in range(STEPS):
            decode()
        return decode.tokens[:, : length + STEPS + 1]

    def verify(tokens: Tensor) -> None:
        trace = [(0.0, row[: length + 1], STEPS, "") for row in tokens[:2].tolist()]
        verify_tokens(model, trace, [row[length + 1 :] for row in tokens[:2].tolist()])

    info = {"tokens": batch * STEPS, "cache_bytes": cache.nbytes}
    bench.run(steps, device=device, verify=verify, reference="contiguous", dtype=DTYPE[device], info=info)


# -- memory: sequences of unequal lengths --------------------------------------------------------------------


@on_devices("cpu")
@pytest.mark.parametrize("impl", ["contiguous", "paged"])
@pytest.mark.parametrize("batch", [8, 64])
@lengths(1024)
def test_memory_at_ragged_lengths(bench, device, impl, batch, length):
    """`batch` sequences of 1 to `length` tokens: the time to make room for them all and to give it back, and
    what is held for what is needed. One piece holds the longest for each; blocks waste less than one each.
    """
    wanted = [
        int(n) for n in torch.randint(1, length + 1, (batch,), generator=torch.Generator().manual_seed(batch))
    ]
    sizes: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 16}
    token = 2 * 2 * 2 * 16 * 4  # bytes: keys and values of 2 layers and 2 heads, float32
    pool = Pool(**sizes, blocks=sum(-(-n // BLOCK) for n in wanted), block_size=BLOCK)

    def in_blocks() -> int:
        sequences = [pool.allocate([0] * n, ids=False) for n in wanted]
        used = pool.blocks.used * BLOCK * token
        for sequence in sequences:
            pool.free(sequence)
        return used

    def in_one_piece() -> int:
        return ContiguousCache(**sizes, batch=batch, capacity=max(wanted)).nbytes

    work, needed = (in_blocks if impl == "paged" else in_one_piece), sum(wanted) * token

    def verify(held: int) -> None:
        assert held >= needed
        assert impl == "contiguous" or held - needed < batch * BLOCK * token, "a whole block is wasted"

    waste = (work() - needed) / needed
    info = {"needed_bytes": needed, "held_bytes": work(), "waste": waste}
    bench.run(work, device=device, verify=verify, reference="contiguous", info=info)


# -- the time to the first token -----------------------------------------------------------------------------

OWN = 32  # tokens of a prompt after what it shares
SHAPES = {
    "cpu": ModelConfig(vocab_size=4096, layers=4, width=384, heads=6, max_length=10240),
    # Llama 2 7B; random weights
    "cuda": ModelConfig(
        vocab_size=32000, layers=32, width=4096, heads=32, mlp_width=11008, mlp="swiglu", max_length=10240
    ),
}
SHAPES["mps"] = SHAPES["cpu"]
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 2 * 2**-8 * 65**0.5}  # as in test_model_speed: 65 branches here
CPU_ROW_S = 6.0  # a row of cold prompts on a CPU may take this long, all calls together


@on_devices()
@pytest.mark.parametrize("impl", ["cold", "warm"])
@lengths(512, 1024, 2048, 4096, 8192)
def test_time_to_first_token(bench, device, impl, length):
    """A prompt of `length` shared tokens and OWN others; warm: the pool has seen the shared ones."""
    flops = cost(SHAPES[device], 1, length + OWN).flops
    seconds = flops / (0.6 * bench.rate(device, DTYPE[device]))
    if device == "cpu" and 6 * seconds > CPU_ROW_S:
        pytest.skip(f"the cold row would take about {6 * seconds:.2g} s here, above {CPU_ROW_S:g} s")
    model = decoder(device)
    shared = ids(length, 0, model.config.vocab_size)
    prompts = (shared + ids(OWN, seed, model.config.vocab_size) for seed in itertools.count(1))
    pool = pool_for(model, 2 * (length + OWN) // BLOCK + 4)
    spaces = itertools.repeat("warm") if impl == "warm" else (f"cold {i}" for i in itertools.count())
    if impl == "warm":
        first_token(model, pool, [*shared, 0], "warm")

    def work() -> tuple[list[int], int, int]:
        prompt = next(prompts)
        return prompt, *first_token(model, pool, prompt, next(spaces))

    def verify(result: tuple[list[int], int, int]) -> None:
        prompt, found, token = result
        assert found == (length // BLOCK * BLOCK if impl == "warm" else 0), f"{found} tokens were found"
        logits = whole(model, prompt)
        missing = (logits.max() - logits[token]).item()
        assert missing <= CLOSE[DTYPE[device]] * logits.abs().max().item(), (
            f"token {token} is {missing} too low"
        )

    bench.run(work, device=device, verify=verify, reference="cold", estimate=seconds, dtype=DTYPE[device])


@torch.no_grad()
def first_token(model: Transformer, pool: Pool, prompt: list[int], space: str) -> tuple[int, int]:
    """How much of the prompt was there, and the token after it."""
    sequence = pool.allocate(prompt, space)
    found = sequence.length
    new = torch.tensor([prompt[found:]], device=pool.k.device)
    token = int(model(new, Rows.of(pool, [sequence]), last_only=True)[0, -1].argmax())
    pool.commit(sequence, len(prompt) - found)
    pool.free(sequence)
    return found, token


@torch.no_grad()
def whole(model: Transformer, tokens: list[int]) -> Tensor:
    """Logits [V] after these tokens, without a cache."""
    device = model.embedding.weight.device
    return model(torch.tensor([tokens], device=device), last_only=True)[0, -1].float()


@functools.cache
def decoder(device: str) -> Transformer:
    """Random weights, made on the device: 7B of them would take minutes on a host."""
    torch.manual_seed(0)
    return Transformer(SHAPES[device], dtype=DTYPE[device], device=device).requires_grad_(False)


def pool_for(model: Transformer, blocks: int) -> Pool:
    config, weight = model.config, model.embedding.weight
    sizes = {"layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    pool = Pool(**sizes, blocks=blocks, block_size=BLOCK, dtype=weight.dtype, device=weight.device)
    random.Random(0).shuffle(pool.blocks.free)
    return pool


def ids(count: int, seed: int, vocab: int) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- the serving loop ----------------------------------------------------------------------------------------

SYSTEM, ASKED = 256, (8, 32)  # tokens: of the shared prompt; of the own one, from and to
NEW = {"cpu": (8, 16), "cuda": (16, 32), "mps": (8, 16)}  # new tokens, from and to
GAP_S = {"cpu": 0.01, "cuda": 0.001, "mps": 0.01}  # mean seconds from one arrival to the next
LLAMA: dict[str, dict[str, int]] = {
    "cpu": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4},
    # Llama 3.2 1B; random weights
    "cuda": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
}
LLAMA["cpu"] |= {"num_key_value_heads": 2, "vocab_size": 512}
LLAMA["cuda"] |= {"num_key_value_heads": 8, "vocab_size": 128256}
LLAMA["mps"] = LLAMA["cpu"]
ONE_S = {"cpu": 0.05, "cuda": 0.25, "mps": 0.4}  # seconds that a request takes alone, for estimates


@on_devices()
@pytest.mark.parametrize("impl", ["sequential", "loop", "transformers_static"])
@pytest.mark.parametrize("concurrency", [1, 8, 32, 64])
@lengths(SYSTEM)
def test_serving_speed(bench, device, impl, concurrency, length):
    """`concurrency` requests arrive as a Poisson process, each with the same system prompt of `length` tokens
    and one of two tenants' namespaces. sequential: `generate`, one after another. transformers_static: its
    generate on all of them at once, left padded, when the last has arrived.
    """
    pytest.importorskip("transformers", reason="needs the package transformers")
    seconds = ONE_S[device] * (concurrency if impl == "sequential" else 1 + concurrency / 8)
    if device == "cpu" and concurrency > 32:
        pytest.skip(f"would take about {4 * seconds:.2g} s here; the row of 32 says the same")
    if impl == "transformers_static" and concurrency in (8, 64):
        pytest.skip("the rows of 1 and 32 requests say enough of it")
    theirs, ours = llama(device)
    trace = arrivals(concurrency, length, ours.config.vocab_size, NEW[device], GAP_S[device])
    server = Server(ours, pool_for(ours, 40 + 8 * concurrency), most=min(64, max(8, concurrency)), chunk=1024)
    serve = {
        "sequential": lambda: one_by_one(ours, trace),
        "loop": lambda: looped(server, trace),
        "transformers_static": lambda: all_at_once(theirs, trace),
    }[impl]
    bench.run(
        serve,
        device=device,
        verify=lambda results: verify_tokens(ours, trace, results),
        reference="sequential",
        estimate=seconds,
        dtype=DTYPE[device],
        rounds=2 if seconds < 2 else 1,
        info={"tokens": sum(new for _, _, new, _ in trace), "requests": concurrency},
    )


Asked = tuple[float, list[int], int, str]  # arrival in seconds, prompt, new tokens, namespace


def arrivals(count: int, system: int, vocab: int, new: tuple[int, int], gap: float) -> list[Asked]:
    """A Poisson process of requests: exponential gaps."""
    chance, at, trace = random.Random(count), 0.0, []
    for i in range(count):
        own = ids(chance.randint(*ASKED), 1000 + i, vocab)
        trace.append((at, ids(system, 0, vocab) + own, chance.randint(*new), "ab"[i % 2]))
        at += chance.expovariate(1 / gap)
    return trace


def wait_until(moment: float) -> None:
    if (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


def looped(server: Server, trace: list[Asked]) -> list[list[int]]:
    """The loop, from a pool that has seen nothing."""
    while server.pool.evict():
        pass
    start, left = time.perf_counter(), list(trace)
    requests = [Request(prompt, new, namespace=space) for _, prompt, new, space in trace]
    while left or not server.idle:
        while left and time.perf_counter() - start >= left[0][0]:
            server.submit(requests[len(trace) - len(left)])
            left.pop(0)
        if server.idle:
            wait_until(start + left[0][0])
        else:
            server.step()
    return [request.tokens for request in requests]


def one_by_one(model: Transformer, trace: list[Asked]) -> list[list[int]]:
    start, results = time.perf_counter(), []
    for at, prompt, new, _ in trace:
        wait_until(start + at)
        tokens = generate(model, torch.tensor([prompt], device=model.embedding.weight.device), new)
        results.append(tokens[0, len(prompt) :].tolist())
    return results


@torch.no_grad()
def all_at_once(model: Any, trace: list[Asked]) -> list[list[int]]:
    wait_until(time.perf_counter() + trace[-1][0])
    widest = max(len(prompt) for _, prompt, _, _ in trace)
    padded = torch.tensor([[0] * (widest - len(prompt)) + prompt for _, prompt, _, _ in trace])
    seen = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for _, prompt, _, _ in trace])
    most = max(new for _, _, new, _ in trace)
    tokens = model.generate(
        padded.to(model.device), attention_mask=seen.to(model.device), max_new_tokens=most, do_sample=False
    )
    return [row[widest : widest + new] for row, (_, _, new, _) in zip(tokens.tolist(), trace, strict=True)]


@torch.no_grad()
def verify_tokens(model: Transformer, trace: list[Asked], results: list[list[int]]) -> None:
    """Of the first, middle and last request each token's logit is the largest, but for rounding."""
    for i in {0, len(trace) // 2, len(trace) - 1}:
        (_, prompt, new, _), tokens = trace[i], results[i]
        assert len(tokens) == new, f"{len(tokens)} tokens, should be {new}"
        sequence = torch.tensor([prompt + tokens], device=model.embedding.weight.device)
        logits = model(sequence[:, :-1])[0, len(prompt) - 1 :].float()
        missing = logits.amax(1) - logits.gather(1, sequence[0, len(prompt) :, None])[:, 0]
        worst, allowed = missing.max().item(), CLOSE[model.embedding.weight.dtype] * logits.abs().max().item()
        assert worst <= allowed, (
            f"a token's logit is {worst:.3g} below the largest, allowed are {allowed:.3g}"
        )


@functools.cache
def llama(device: str) -> tuple[Any, Transformer]:
    """A Llama of transformers with random weights that never ends, and the same in our decoder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from perf_lab.model.load import from_hugging_face

    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(**LLAMA[device], max_position_embeddings=2048, dtype=DTYPE[device])
        theirs = LlamaForCausalLM(config).to(DTYPE[device]).eval()
    theirs.generation_config = copy.deepcopy(theirs.generation_config)
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    return theirs, from_hugging_face(theirs)
