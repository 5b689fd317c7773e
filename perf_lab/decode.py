"""The decode step as one unit of device work: everything that changes from step to step lies on the device.

Launched kernel by kernel, a step of a small model waits for the host: 16 kernels a layer at about 10 us each,
where their work takes one. So the token, its slot and the sequence's length are tensors, a step reads and
moves them on, and on a CUDA device it is recorded once and replayed: one launch a token.

Source: CUDA C++ programming guide, CUDA graphs; torch.cuda.CUDAGraph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perf_lab.attention import attention

Choose = Callable[[int | Tensor, Tensor], Tensor]  # (step, logits [B, V]) -> tokens [B]

STEPS_BEFORE_RECORDING = 1  # runs that warm up what a graph may not: libraries' workspaces, compilation


def can_step(model: Any, cache: Any) -> bool:
    """Whether model and cache have what a `Decode` needs."""
    return hasattr(model, "step") and (pages(cache) or hasattr(cache, "memory"))


def pages(cache: Any) -> bool:
    """Whether the cache has slots of its own kind, which hold for one sequence only."""
    return hasattr(cache, "slots")


class Decode:
    """Steps over a preallocated cache, each computing one token of every row and choosing the next.

    `tokens` [B, capacity + 1] int64 holds the sequences. `begin` says how many columns of it the cache holds.
    A step gives the model the next column, and writes the tokens that follow into the one after; with `eos`,
    a row that has ended gets nothing else. `keep` commits to the cache what was computed: until then it does
    not know of it. After that another sequence may begin.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        choose: Choose,
        *,
        pads: Tensor | None = None,
        eos: int | None = None,
    ) -> None:
        self.model, self.cache, self.choose = model, cache, choose
        self.pads, self.eos = pads, eos
        like: dict[str, Any] = {"dtype": torch.int64, "device": cache.device}
        self.tokens = torch.zeros(cache.batch, cache.capacity + 1, **like)
        self.ended = torch.zeros(cache.batch, dtype=torch.bool, device=cache.device)
        self.at = torch.zeros(1, **like)
        self.slots: Any = None  # made when the first sequence begins
        self.step = torch.zeros(1, **like)
        self.mask = (
            None if pads is None else (torch.arange(cache.capacity, **like) >= pads[:, None])[:, None, None]
        )
        self.done, self.warm, self.records = 0, 0, False
        self.graph: torch.cuda.CUDAGraph | None = None

    def serves(self, model: Any, eos: int | None) -> bool:
        """Whether a greedy call with these arguments, without padding, has this step; it is one too."""
        return model is self.model and eos == self.eos

    def begin(self, held: int, step: int, ended: Tensor) -> Tensor:
        """Go on after `held` columns; `choose` gets the numbers from `step` on. Rows of `ended` [B] get eos
        only; gives the tensor in which they are marked from now on.
        """
        self.at.fill_(held)
        self.step.fill_(step)
        if self.slots is None:
            self.slots = self.cache.slots(self.at) if pages(self.cache) else Slots(self.cache, self.at)
            self.slots.read_by_host = self.at.device.type == "cpu"
            # a graph holds nothing that waits for the device, as a paged cache in float64 does
            self.records = self.at.is_cuda and getattr(self.slots, "fast", True)
        self.ended.copy_(ended)
        return self.ended

    def __call__(self) -> None:
        """One more token in every row."""
        if self.graph is not None:
            self.graph.replay()
        elif self.records and self.warm >= STEPS_BEFORE_RECORDING:
            self.graph = record(self._advance)
            self.graph.replay()
        else:
            self._advance()
            self.warm += 1
        self.done += 1

    def keep(self) -> None:
        """Commit the tokens computed so far to the cache."""
        self.cache.advance(self.done)
        self.done = 0

    def _advance(self) -> None:
        at = self.at
        now = self.tokens.index_select(1, at)  # [B, 1]
        positions = at if self.pads is None else (at - self.pads).clamp(min=0)[:, None]
        self.slots.seen = (at + 1).expand(len(now))
        logits = self.model.step(now, self.slots, positions, self.mask)[:, -1]  # [B, V]
        chosen = self.choose(self.step, logits)
        if self.eos is not None:
            chosen = chosen.masked_fill(self.ended, self.eos)
            self.ended |= chosen == self.eos
        at += 1
        self.step += 1
        self.tokens.index_copy_(1, at, chosen[:, None])


class Slots:
    """A cache whose next free slot, `at` [1], is known to the device only; it takes one token at a time."""

    read_by_host = False  # whether the host may look at `at`, too

    def __init__(self, cache: Any, at: Tensor) -> None:
        self.cache, self.at = cache, at
        self.seen = (at + 1).expand(cache.batch)  # keys of each row, the new one counted

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, mask: Tensor | None
    ) -> Tensor:
        """Attention of q [B, H, 1, D] over the tokens held and the new one, k and v [B, Hkv, 1, D]."""
        self.cache.write(layer, k, v, self.at)
        return self.look(layer, q, window=window, mask=mask)

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where the layer's keys and values lie, [B, Hkv, capacity, D]."""
        return self.cache.memory(layer)

    def look(self, layer: int, q: Tensor, *, window: int | None, mask: Tensor | None) -> Tensor:
        """Attention of q [B, H, 1, D] over what has been stored, the new token's slot included."""
        return attend(q, *self.memory(layer), window=window, mask=mask, lengths=self.seen)


def attend(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Causal attention by the best implementation that takes this call and reads `lengths` on the device; a
    CPU's host and device are one.
    """
    how["causal"] = True
    if q.device.type != "cuda":
        return attention["sdpa"].fn(q, k, v, **how)
    split = attention.implementations.get("split")
    takes = split is not None and not any(limit.applies(q, k, v, **how) for limit in split.limits)
    return attention["split" if takes else "naive"].fn(q, k, v, **how)


def record(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `work` launches on the current CUDA device; it is not run. It must have run before.

    torch.cuda.graph would also collect garbage and empty the allocator's cache, some 100 ms.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
