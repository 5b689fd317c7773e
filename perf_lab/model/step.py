"""One token a row through all layers of the decoder: the step that a CUDA graph replays.

    logits = step(model, tokens, slots, positions, mask)

tokens     [B, 1] int64.
slots      takes the place of the cache: `attend(layer, q, k, v, window=, mask=)` adds k, v [B, Hkv, 1, D] to
           what it holds and gives the attention of q [B, H, 1, D] over all of it, [B, H, 1, D]. Those over
           one block of memory (perf_lab.decode.Slots) also give the parts of that: `memory(layer)`, the keys
           and values [B, Hkv, capacity, D], `at`, the slot [1] to write, `look(layer, q, window=, mask=)`.
           Those over blocks (perf_lab.kv_cache.Rows) have `turn_and_store(layer, qkv, turn, heads)`.
positions  [1] or [B, 1] int64.
mask       as the op `attention` takes it, over what slots holds.
logits     [B, 1, V], what `model` gives for the same token after the same cache.

Nothing is checked and nothing read by the host.

`plain` is the forward of the layers as they are, 15 to 20 kernels a layer. At one token each of them takes
longer to begin than to work, also in a graph, so `fused` leaves out what can be left out: a residual is added
by the norm that reads it, q and k are turned and k and v stored by one kernel, silu and product are one.
`host` is the CPU's: it calls the operations without modules and checks between them.

least bytes  the weights, the cached keys and values, once each.
"""

from typing import Any

import torch
from torch import Tensor

from perf_lab import machine
from perf_lab.op import FLOATS, Op

decode_step: Op = Op("decode_step", reference="plain")


@decode_step.register("plain", dtypes=(*FLOATS, torch.float64))
def plain(model: Any, tokens: Tensor, slots: Any, positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """The layers' own forward."""
    return model.head(model.norm(model.hidden(tokens, slots, positions, mask)))


def fuses(slots: Any, weight: Tensor) -> bool:
    """Whether the fused kernels serve here: Triton runs, the memory is one block, the dtype none too wide."""
    runs = "fused" in decode_step.implementations and (weight.is_cuda or machine.interpreting())
    return runs and (hasattr(slots, "memory") or getattr(slots, "fast", False)) and weight.dtype in FLOATS


def best(slots: Any, weight: Tensor) -> str:
    """The name of the implementation for a model of such weights over these slots."""
    if getattr(slots, "read_by_host", False) and hasattr(slots, "memory"):
        return "host"
    return "fused" if fuses(slots, weight) else "plain"


decode_step.load("perf_lab.model", "step_fused", "step_host")
