"""What a decoder must never get wrong, above all that a cache changes nothing but the time."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from perf_lab.model import ModelConfig, cost, decoder, oracle
from perf_lab.model.rope import Dynamic, Linear, LongRope
from perf_lab.numerics import assert_close, poisoned
from perf_lab.pytest_plugin import implementations, on_devices

from .test_kv_cache import refuses

# The project's bars for equal logits, in units of the largest one. A logit is a sum of at most 2 * layers + 1
# branches of at most mlp_width = 64 terms: some hundred roundings, 4e-14 and 2e-5 if all went one way.
BARS = {torch.float64: 1e-10, torch.float32: 1e-4}

SMALL = ModelConfig(vocab_size=19, layers=2, width=16, heads=4, kv_heads=2, max_length=24)


@st.composite
def configs(
    draw: Any, positions: tuple[str, ...] = ("rotary", "learned"), windows: bool = True
) -> ModelConfig:
    """A small decoder: grouped heads or not, either kind of positions, with and without a window (in some of
    the layers or all), either MLP, with and without biases.
    """
    groups, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]))
    window = draw(st.none() | st.integers(1, 8)) if windows else None
    return ModelConfig(
        vocab_size=19,
        layers=draw(st.integers(1, 3)),
        width=groups * kv_heads * draw(st.sampled_from([4, 6])),
        heads=groups * kv_heads,
        kv_heads=kv_heads,
        mlp_width=draw(st.sampled_from([16, 64])),
        max_length=24,
        positions=draw(st.sampled_from(positions)),
        attention=draw(st.sampled_from(["sdpa", "naive", "chunked"])),
        window=window,
        window_layers=draw(st.sampled_from([None, (0,), (1, 2)])) if window else None,
        tie_embeddings=draw(st.booleans()),
        mlp=draw(st.sampled_from(["gelu", "swiglu"])),
        head_size=draw(st.sampled_from([None, 2, 10])),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )


seeds = st.integers(0, 2**16)
cuts = st.lists(st.integers(1, 5), min_size=1, max_size=5)  # the lengths of the chunks of a sequence


@implementations(decoder)
@given(config=configs(), seed=seeds, length=st.integers(1, 12), data=st.data())
def test_logits_are_those_of_the_definition(device, impl, config, seed, length, data):
    dtype = data.draw(st.sampled_from(dtypes(device)), label="dtype")
    model, tokens = build(impl, config, seed, device, dtype), ids(config, (1, length), seed, device)
    should_be = oracle(config, model.state_dict(), tokens[0])[None]
    same_logits(model(tokens), should_be, dtype, f"{impl}, {config}, seed {seed}, {length} tokens")


@implementations(decoder)
@given(config=configs(), seed=seeds, batch=st.integers(1, 2), chunks=cuts, data=st.data())
def test_any_split_into_chunks_gives_the_logits_of_the_whole(device, impl, config, seed, batch, chunks, data):
    dtype = data.draw(st.sampled_from(dtypes(device)), label="dtype")
    chunks = within(chunks, config.max_length)
    model, tokens = build(impl, config, seed, device, dtype), ids(config, (batch, sum(chunks)), seed, device)
    cached = in_chunks(model, tokens, chunks)
    same_logits(cached, model(tokens), dtype, f"{impl}, {config}, seed {seed}, chunks {chunks}")


@implementations(decoder)
@given(
    config=configs(), seed=seeds, kept=st.integers(0, 7), dropped=st.integers(0, 5), chunk=st.integers(1, 4)
)
def test_after_a_truncate_the_cache_goes_on_from_what_is_kept(
    device, impl, config, seed, kept, dropped, chunk
):
    model, tokens = build(impl, config, seed, device), ids(config, (1, kept + dropped + chunk), seed, device)
    cache = empty_cache(model, 1, kept + dropped + chunk)
    if kept + dropped:
        model(tokens[:, : kept + dropped], cache)
    cache.truncate(kept)
    new = tokens[:, kept + dropped :]
    whole = model(torch.cat((tokens[:, :kept], new), 1))[:, kept:]
    same_logits(model(new, cache), whole, exact(device), f"{impl}, {config}, seed {seed}, kept {kept}")
    assert cache.length == kept + chunk


@implementations(decoder)
@given(
    config=configs(),
    seed=seeds,
    pads=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    chunks=cuts,
    cached=st.booleans(),
)
def test_a_left_padded_row_is_as_if_alone(device, impl, config, seed, pads, chunks, cached):
    chunks = within([max(pads) + 1, *chunks], config.max_length)
    model, tokens = build(impl, config, seed, device), ids(config, (len(pads), sum(chunks)), seed, device)
    padding = torch.tensor(pads, device=device)
    padded = in_chunks(model, tokens, chunks, padding) if cached else model(tokens, pads=padding)
    for row, pad in enumerate(pads):
        alone = model(tokens[row : row + 1, pad:])
        same_logits(
            padded[row : row + 1, pad:], alone, exact(device), f"{impl}, {config}, seed {seed}, row {row}"
        )


@implementations(decoder)
@given(config=configs(), seed=seeds, batch=st.integers(1, 3), length=st.integers(1, 9))
def test_each_row_of_a_batch_is_as_if_alone(device, impl, config, seed, batch, length):
    model, tokens = build(impl, config, seed, device), ids(config, (batch, length), seed, device)
    alone = torch.cat([model(row[None]) for row in tokens])
    same_logits(model(tokens), alone, exact(device), f"{impl}, {config}, seed {seed}, batch {batch}")


@implementations(decoder)
@given(config=configs(), seed=seeds, past=st.integers(1, 7), future=st.integers(1, 5))
def test_future_tokens_do_not_leak(device, impl, config, seed, past, future):
    model, tokens = build(impl, config, seed, device), ids(config, (2, past + future), seed, device)
    changed = tokens.clone()
    changed[:, past:] = (tokens[:, past:] + 1) % config.vocab_size
    assert torch.equal(model(tokens)[:, :past], model(changed)[:, :past])


@implementations(decoder)
@given(config=configs(), seed=seeds, length=st.integers(1, 9), cached=st.booleans())
def test_last_only_gives_the_last_of_all(device, impl, config, seed, length, cached):
    model, tokens = build(impl, config, seed, device), ids(config, (2, length), seed, device)
    cache = empty_cache(model, 2, length) if cached else None
    last = model(tokens, cache, last_only=True)
    same_logits(last, model(tokens)[:, -1:], exact(device), f"{impl}, {config}, seed {seed}, length {length}")


@implementations(decoder)
@given(config=configs(positions=("rotary",)), seed=seeds, length=st.integers(2, 8), shift=st.integers(1, 16))
def test_rotary_positions_count_by_their_distances_only(device, impl, config, seed, length, shift):
    model, tokens = build(impl, config, seed, device), ids(config, (1, length), seed, device)
    moved = model(tokens, positions=torch.arange(shift, shift + length, device=device))
    same_logits(moved, model(tokens), exact(device), f"{impl}, {config}, seed {seed}, shift {shift}")


@implementations(decoder)
@given(config=configs(), seed=seeds, n=st.integers(1, 3), length=st.integers(1, 6))
def test_the_first_layers_are_a_model_of_their_own(device, impl, config, seed, n, length):
    model, tokens = build(impl, config, seed, device), ids(config, (1, length), seed, device)
    n = min(n, config.layers)
    draft = model.first_layers(n)
    should_be = oracle(dataclasses.replace(config, layers=n), model.state_dict(), tokens[0])[None]
    same_logits(draft(tokens), should_be, exact(device), f"{impl}, {config}, seed {seed}, {n} layers")
    assert {p.data_ptr() for p in draft.parameters()} <= {p.data_ptr() for p in model.parameters()}
    assert draft.new_cache(1, 4).layers == n


@implementations(decoder)
@given(config=configs(), seed=seeds, length=st.integers(1, 6))
def test_all_first_layers_are_the_model_itself(device, impl, config, seed, length):
    model, tokens = build(impl, config, seed, device), ids(config, (1, length), seed, device)
    whole = model.first_layers(config.layers)
    assert torch.equal(whole(tokens), model(tokens))
    assert whole.config == config


@implementations(decoder)
@given(config=configs(), seed=seeds)
def test_a_seed_gives_the_same_weights_everywhere(device, impl, config, seed):
    model, again, half = (
        impl.fn.seeded(config, seed, dtype, device)
        for dtype in (torch.float32, torch.float32, torch.bfloat16)
    )
    for (name, weight), same, rounded in zip(
        model.named_parameters(), again.parameters(), half.parameters(), strict=True
    ):
        assert weight.device.type == device
        assert torch.equal(weight, same), name
        assert torch.equal(weight.bfloat16(), rounded), name
    other = impl.fn.seeded(config, seed + 1, device=device)
    assert not torch.equal(model.embedding.weight, other.embedding.weight)


@implementations(decoder)
def test_the_weights_of_a_seed_are_those_of_the_committed_results(device, impl):
    model = impl.fn.seeded(SMALL, seed=3, device=device)
    sums = torch.stack([weight.double().sum().cpu() for weight in model.parameters()])
    assert_close(sums, SEEDED_SUMS, 1e-4, f"{impl}, {SMALL}, seed 3")


@implementations(decoder)
@given(config=configs(), seed=seeds)
def test_seeding_a_model_leaves_the_global_random_state_alone(device, impl, config, seed):
    with torch.random.fork_rng(devices=[]):
        before = torch.manual_seed(seed + 1).get_state()
        impl.fn.seeded(config, seed, device=device)
        assert torch.equal(before, torch.get_rng_state())


@implementations(decoder)
@given(config=configs(), batch=st.integers(1, 3), capacity=st.integers(0, 50))
def test_the_cache_holds_keys_and_values_of_its_capacity(device, impl, config, batch, capacity):
    cache = build(impl, config, 0, device, torch.float32).new_cache(batch, capacity)
    assert (cache.length, cache.capacity, cache.dtype) == (0, capacity, torch.float32)
    assert cache.nbytes == 2 * 4 * config.layers * batch * config.kv_heads * config.head_dim * capacity


@implementations(decoder)
@given(bad=st.deferred(lambda: st.sampled_from(sorted(REFUSED))), known=st.integers(1, 3))
def test_a_refused_call_leaves_the_cache_as_it_was(device, impl, bad, known):
    model, tokens = build(impl, SMALL, 0, device), ids(SMALL, (2, 8), 0, device)
    cache = empty_cache(model, 2, 8)
    model(tokens[:, :known], cache)
    with refuses(TypeError, ValueError):
        REFUSED[bad](model, tokens, cache)
    assert cache.length == known
    rest = model(tokens[:, known:], cache)
    same_logits(rest, model(tokens)[:, known:], exact(device), f"{impl} after {bad}")


@implementations(decoder)
@given(config=configs(), known=st.integers(0, 3))
def test_no_tokens_give_no_logits(device, impl, config, known):
    model, tokens = build(impl, config, 0, device), ids(config, (1, 3), 0, device)
    cache = empty_cache(model, 1, 4)
    model(tokens[:, :known], cache)
    assert model(tokens[:, :0], cache).shape == (1, 0, config.vocab_size)
    assert cache.length == known


MISFITS: list[tuple[str, Any]] = [
    *((name, 0) for name in ("vocab_size", "layers", "max_length", "window", "head_size")),
    ("width", -16),
    ("width", 12),  # heads of 3, which cannot be turned
    ("heads", 3),
    ("kv_heads", 3),
    ("layers", 1.0),
    ("window", 2.5),
    ("window_layers", (0,)),  # without a window
    ("window_layers", [0]),
    ("head_size", 5),
    *((name, "unknown") for name in ("positions", "mlp", "attention")),
    ("rope_theta", 0.0),
    ("norm_eps", float("nan")),
]


@pytest.mark.parametrize(("field", "value"), MISFITS)
def test_sizes_that_do_not_fit_together_are_refused(field, value):
    with refuses(TypeError, ValueError, naming=field):
        dataclasses.replace(SMALL, **{field: value})


@given(config=configs(windows=False), batch=st.integers(1, 3), new=st.integers(1, 5), known=st.integers(0, 5))
def test_the_cost_is_that_of_the_matrix_products(config, batch, new, known):
    model = build(decoder["transformer"], config, 0, "cpu")
    tokens = ids(config, (batch, known + new), 0, "cpu")
    model.layers.apply(
        lambda module: setattr(module, "attend", _no_attention) if hasattr(module, "attend") else None
    )
    with FlopCounterMode(display=False) as counted:
        model(tokens[:, known:])
    pairs = sum(known + i + 1 for i in range(new))
    attention = 4 * batch * config.layers * config.heads * config.head_dim * pairs
    assert cost(config, batch, new, known, last_only=False).flops == counted.get_total_flops() + attention


@on_devices("cuda")
@pytest.mark.parametrize(
    "rope", [None, Linear(2.0), Dynamic(2.0, 3), LongRope((1.0, 2.0), (3.0, 4.0), 3, 1.5)]
)
def test_a_step_does_not_wait_for_the_device(device, rope):
    config = dataclasses.replace(SMALL, mlp="swiglu", rope=rope)
    model = build(decoder["transformer"], config, 0, device, torch.float32)
    tokens = ids(SMALL, (1, 4), 0, device)
    cache = model.new_cache(1, 8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (slice(0, 3), slice(3, 4)):
            tokens[:, -1] = model(tokens[:, step], cache, last_only=True)[:, -1].argmax(-1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# One sum a parameter of SMALL, as in the first release.
SEEDED_SUMS = torch.tensor(
    [
        1.743771,
        16,
        -1.842606,
        -1.913253,
        16,
        -15.629943,
        0.661702,
        16,
        6.510201,
        -0.104026,
        16,
        11.572029,
        1.714242,
        16,
        7.1604,
    ],
    dtype=torch.float64,
)


def dtypes(device: str) -> list[torch.dtype]:
    """The dtypes with a bar, on a device (Metal has no float64)."""
    return [dtype for dtype in BARS if device != "mps" or dtype != torch.float64]


def exact(device: str) -> torch.dtype:
    """The widest dtype of a device."""
    return dtypes(device)[0]


def build(impl: Any, config: ModelConfig, seed: int, device: str, dtype: torch.dtype | None = None) -> Any:
    """A model of the widest dtype, its norms' weights random too; no gradients."""
    model = impl.fn.seeded(config, seed, dtype or exact(device), device).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.mul_((1 + torch.rand(weight.shape, generator=generator)).to(device))
    return model


def ids(config: ModelConfig, shape: tuple[int, int], seed: int, device: str) -> Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def empty_cache(model: Any, batch: int, capacity: int) -> Any:
    """A cache whose unwritten slots hold NaN, and which has some that stay unwritten."""
    with poisoned():
        return model.new_cache(batch, capacity + 3)


def within(chunks: list[int], most: int) -> list[int]:
    """The first of these chunks, as many as have at most `most` tokens together."""
    sums = itertools.accumulate(chunks)
    return [chunk for chunk, total in zip(chunks, sums, strict=True) if total <= most]


def in_chunks(model: Any, tokens: Tensor, chunks: list[int], pads: Tensor | None = None) -> Tensor:
    """The logits of all tokens, computed a chunk at a time with a cache."""
    cache = empty_cache(model, *tokens.shape)
    return torch.cat([model(part, cache, pads=pads) for part in tokens.split(chunks, 1)], 1)


def same_logits(got: Tensor, should_be: Tensor, dtype: torch.dtype, call: str) -> None:
    should_be = should_be.to(got.device, got.dtype)
    wide = should_be if dtype is torch.float64 else should_be.cpu().double()
    assert_close(got, wide, BARS[dtype] * wide.abs().max().item(), call)


def _no_attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return q


REFUSED: dict[str, Any] = {
    "tokens past the capacity": lambda model, tokens, cache: model(tokens.repeat(1, 2), cache),
    "tokens past max_length": lambda model, tokens, cache: model(tokens.repeat(1, 4)),
    "tokens of another batch": lambda model, tokens, cache: model(tokens[:1, :1], cache),
    "tokens without a batch": lambda model, tokens, cache: model(tokens[0], cache),
    "tokens of another dtype": lambda model, tokens, cache: model(tokens[:, :1].int(), cache),
    "tokens of no tensor": lambda model, tokens, cache: model([[1], [2]], cache),
    "a cache of fewer layers": lambda model, tokens, cache: model(
        tokens[:, :1], model.first_layers(1).new_cache(2, 4)
    ),
    "a model of fewer layers": lambda model, tokens, cache: model.first_layers(1)(tokens[:, :1], cache),
    "a model of another dtype": lambda model, tokens, cache: type(model)(
        SMALL, dtype=torch.bfloat16, device=tokens.device
    ).requires_grad_(False)(tokens[:, :1], cache),
    "a model with gradients": lambda model, tokens, cache: type(model).seeded(
        SMALL, 0, cache.dtype, tokens.device
    )(tokens[:, :1], cache),
    "positions past max_length": lambda model, tokens, cache: model(
        tokens[:, :1], cache, positions=tokens[0, :1] + 24
    ),
    "negative positions": lambda model, tokens, cache: model(
        tokens[:, :1], cache, positions=tokens[0, :1] - 20
    ),
    "too many positions": lambda model, tokens, cache: model(tokens[:, :1], cache, positions=tokens[0, :2]),
    "pads of another batch": lambda model, tokens, cache: model(tokens[:, :1], cache, pads=tokens[0, :3]),
    "pads of another dtype": lambda model, tokens, cache: model(
        tokens[:, :1], cache, pads=tokens[:, 0].double()
    ),
    "no first layers": lambda model, tokens, cache: model.first_layers(0),
    "too many first layers": lambda model, tokens, cache: model.first_layers(3),
}
