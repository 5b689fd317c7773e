"""What a decode step must never get wrong: the step that a CUDA graph replays."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from perf_lab.decode import Slots
from perf_lab.model import decoder, oracle
from perf_lab.model.step import decode_step
from perf_lab.numerics import eps
from perf_lab.pytest_plugin import implementations

from .test_model import build, configs, empty_cache, ids, seeds

held = st.integers(1, 6)


@implementations(decode_step, dtypes=True)
@given(config=configs(), seed=seeds, batch=st.integers(1, 3), held=held)
def test_a_step_gives_the_logits_of_the_definition(device, impl, dtype, config, seed, batch, held):
    model, slots, tokens = after(config, seed, batch, held, device, dtype)
    got = step(impl, model, slots, tokens)  # [B, V]
    plain = step(decode_step["plain"], *after(config, seed, batch, held, device, dtype))
    weights = model.state_dict()
    for row, logits, other in zip(tokens.cpu(), got.cpu(), plain.cpu(), strict=True):
        should_be = oracle(config, weights, row)[-1]
        # Another order of sums and roundings errs as much as the plain one; ulps for where that is lucky.
        slack = 8 * eps(dtype) * should_be.abs().max()
        allowed = 2 * (other.double() - should_be).abs().max() + slack
        assert (logits.double() - should_be).abs().max() <= allowed


@implementations(decode_step, dtypes=True)
@given(config=configs(), seed=seeds, batch=st.integers(1, 3), held=held)
def test_a_step_stores_the_keys_and_values_of_its_token(device, impl, dtype, config, seed, batch, held):
    model, slots, tokens = after(config, seed, batch, held, device, dtype)
    before = [[part.clone() for part in read(slots.cache, layer)] for layer in range(config.layers)]
    step(impl, model, slots, tokens)
    slots.cache.advance(1)
    whole = model.new_cache(batch, held + 2)
    model(tokens, whole)
    for layer in range(config.layers):
        parts = (read(slots.cache, layer), before[layer], read(whole, layer))
        for name, got, was, should_be in zip("kv", *parts, strict=True):
            assert torch.equal(got[:, :, :held], was), f"{name} of layer {layer}: what was held has changed"
            # One row and many rows round differently, layer after layer.
            allowed = 2 ** (5 + layer) * eps(dtype) * should_be.abs().max()
            assert (got - should_be)[:, :, held].abs().max() <= allowed, f"{name} of layer {layer}"


@torch.no_grad()
def after(config, seed, batch, held, device, dtype):
    """A model, its cache's slots after `held` tokens, and all tokens [B, held + 1]; free slots hold NaN."""
    model = build(decoder["transformer"], config, seed, device, dtype)
    tokens = ids(config, (batch, held + 1), seed, device)
    cache = empty_cache(model, batch, held + 2)
    model(tokens[:, :held], cache)
    return model, Slots(cache, torch.full((1,), held, device=device)), tokens


@torch.no_grad()
def step(impl, model, slots, tokens):
    return impl.fn(model, tokens[:, -1:], slots, slots.at)[:, -1]


def read(cache, layer):
    """All keys and values [B, Hkv, length, D] of a layer."""
    none = cache.memory(layer)[0][:, :, :0]
    return cache.append(layer, none, none)
