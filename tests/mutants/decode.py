"""Wrong decode steps, each the fused one but for one fault."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from perf_lab.model import step_fused
from perf_lab.model.step import decode_step
from perf_lab.model.step_fused import fused, silu_product, turn_and_store

from . import mutant

LOGITS = "test_decode::test_a_step_gives_the_logits_of_the_definition"
STORED = "test_decode::test_a_step_stores_the_keys_and_values_of_its_token"
FUSED: dict[str, Any] = {"dtypes": (torch.float32,), "devices": ("cuda",), "interpreted": True}


def with_part(name: str, part: Any, *args: Any) -> Tensor:
    """The fused step with one of its kernels changed."""
    with mock.patch.object(step_fused, name, part):
        return fused(*args)


@mutant(decode_step, killed_by=LOGITS, **FUSED)
def turned_the_other_way(*args: Any) -> Tensor:
    """Queries and keys turn backwards: right to each other, and wrong to what the cache holds."""

    def wrong(qkv: Tensor, turn: Any, *rest: Any) -> Tensor:
        return turn_and_store(qkv, turn and (turn[0], -turn[1]), *rest)

    return with_part("turn_and_store", wrong, *args)


@mutant(decode_step, killed_by=LOGITS, **FUSED)
def tokens_own_key_unseen(*args: Any) -> Tensor:
    """The new token is stored one slot late, so that it sees what lay in its slot."""

    def wrong(qkv: Tensor, turn: Any, heads: int, memory: Any, at: Tensor) -> Tensor:
        return turn_and_store(qkv, turn, heads, memory, at + 1)

    return with_part("turn_and_store", wrong, *args)


@mutant(decode_step, killed_by=LOGITS, **FUSED)
def gate_and_up_exchanged(*args: Any) -> Tensor:
    """silu of up times gate."""

    def wrong(x: Tensor) -> Tensor:
        return silu_product(torch.cat(x.chunk(2, -1)[::-1], -1))

    return with_part("silu_product", wrong, *args)


@mutant(decode_step, killed_by=LOGITS, **FUSED)
def residual_forgotten(*args: Any) -> Tensor:
    """The residual stream goes on with the last branch alone."""
    right = step_fused._add_norm

    def wrong(delta: Tensor, x: Tensor, norm: Any) -> Any:
        return right(delta, x, norm)[0], delta

    return with_part("_add_norm", wrong, *args)


@mutant(decode_step, killed_by=STORED, **FUSED)
def keys_stored_unturned(*args: Any) -> Tensor:
    """The query is turned and the key is not, once the step has read it."""

    def wrong(qkv: Tensor, turn: Any, heads: int, memory: Any, at: Tensor) -> Tensor:
        turn_and_store(qkv, None, heads, memory, at)
        other = tuple(torch.empty_like(m) for m in memory)
        return turn_and_store(qkv, turn, heads, other, at)

    return with_part("turn_and_store", wrong, *args)


@mutant(decode_step, killed_by=STORED, **FUSED)
def first_slot_written_too(*args: Any) -> Tensor:
    """The token's key and value are put into slot 0 as well, after the step."""
    model, _, slots, _ = args[:4]
    logits = fused(*args)
    for layer in range(len(model.layers)):
        for part in slots.memory(layer):
            part[:, :, 0] = part[:, :, slots.at].squeeze(2)
    return logits
