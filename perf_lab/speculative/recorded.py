"""A round as one unit of device work, so that a CUDA graph holds it: draft steps, verification and
acceptance.

Launched kernel by kernel, a round of small models waits for the host, as a decode step does
(perf_lab.decode). Here the number of tokens lies on the device, every round has the same shape, and what the
host reads is one row of numbers a round:

shape     gamma proposals in every round, the last ones too: both caches have gamma slots more than the
          sequence needs, and what passes the budget is cut off by the host.
draft     its first step reads the last two tokens: the cache holds all before them, whatever was accepted.
          One that is no model, or a model that cannot be recorded, proposes from the host as ever.
"""

from typing import Any

import torch
from torch import Tensor

from perf_lab.decode import STEPS_BEFORE_RECORDING, Slots, can_step, record
from perf_lab.sampling import pick
from perf_lab.speculative.acceptance import accept, accept_greedy
from perf_lab.speculative.model_draft import ModelDraft


def can_record(rows: Any) -> bool:
    """Whether the rounds of these rows, a `Rows`, have a form that a graph can hold."""
    return (
        len(rows.ends) == 1
        and rows.pads is None
        and rows.sampling.repetition_penalty is None
        and can_step(rows.target, rows.cache)
        and rows.cache.capacity >= rows.full - 1 + rows.gamma
        and (rows.sampling.greedy or steps(rows))
    )


def steps(rows: Any) -> bool:
    """Whether the draft's steps can be part of the graph."""
    draft = rows.draft
    if type(draft) is not ModelDraft or not can_step(draft.model, draft.cache):
        return False
    return bool(draft.cache.capacity >= rows.full - 1 + rows.gamma)


class Span(Slots):
    """A cache of one row whose next free slot, `at` [1], the device knows; it takes `width` tokens at a time.

    The model takes them for as many rows of one token, [width, 1]: so its step serves as it is. Row r stands
    in slot at + r, and sees what the slots up to it hold.
    """

    def __init__(self, cache: Any, at: Tensor, width: int) -> None:
        super().__init__(cache, at)
        self.offsets = torch.arange(width, device=at.device)

    def read(self, model: Any, tokens: Tensor, at: Tensor) -> Tensor:
        """Logits [1, width, V] of the columns of tokens [1, C] from `at` on."""
        self.at, self.seen = at, at + len(self.offsets)
        self.places = at + self.offsets
        now = tokens.index_select(1, self.places).clamp(max=model.config.vocab_size - 1)  # [1, width]
        return model.step(now.mT, self, self.places[:, None], None).transpose(0, 1)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, mask: Tensor | None
    ) -> Tensor:
        """Attention of q [width, H, 1, D] over what is held and k and v [width, Hkv, 1, D]."""
        self.cache.write(layer, k.transpose(0, 2), v.transpose(0, 2), self.places)
        return self.look(layer, q, window=window, mask=mask)

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, [width, Hkv, capacity less, D]: slot s of row r is slot s + r."""
        keys, values = (self._by_row(x) for x in self.cache.memory(layer))
        return keys, values

    def look(self, layer: int, q: Tensor, *, window: int | None, mask: Tensor | None) -> Tensor:
        """Attention of q [width, H, 1, D], row r over the slots up to at + r."""
        keys, values = self.cache.memory(layer)  # [1, Hkv, capacity, D]
        q = q.transpose(0, 2)  # [1, H, width, D]
        seen = self.attention(q, keys, values, causal=True, window=window, mask=mask, lengths=self.seen)
        return seen.transpose(0, 2)

    def _by_row(self, x: Tensor) -> Tensor:
        _, heads, capacity, dim = x.shape
        width, strides = len(self.offsets), x.stride()
        return x.as_strided((width, heads, capacity - width + 1, dim), (strides[2], *strides[1:]))


class Recorded:
    """The rounds of one row, a `Rows`, from its second on; numbers [rounds, 1, 2 gamma + 1] to sample."""

    def __init__(self, rows: Any, numbers: Tensor | None) -> None:
        self.rows, self.numbers, self.k = rows, numbers, rows.gamma
        device = rows.tokens.device
        self.end = torch.full((1,), rows.ends[0], device=device)  # columns that hold
        self.turn = torch.full((1,), rows.forwards, device=device)
        self.raw = torch.zeros(1, self.k, dtype=torch.int64, device=device)  # as proposed, unclamped
        self.count = torch.full((1,), self.k, device=device)
        self.report = torch.zeros(1, 2 * self.k + 2, dtype=torch.int64, device=device)
        self.offsets = torch.arange(self.k + 1, device=device)
        self.verifier = Span(rows.cache, self.end, self.k + 1)
        self.readers = [Span(rows.draft.cache, self.end, width) for width in (2, 1)] if steps(rows) else []
        self.done = 0
        self.graph: Any = None

    def round(self) -> None:
        """One round, and what it gave to the rows."""
        rows = self.rows
        end, count = rows.ends[0], min(self.k, rows.full - rows.ends[0] - 1)
        if not self.readers:
            count = self._ask(end, count)
        if self.graph is not None:
            self.graph.replay()
        elif rows.tokens.is_cuda and self.done >= STEPS_BEFORE_RECORDING:
            self.graph = record(self._advance)
            self.graph.replay()
        else:
            self._advance()
        self.done += 1
        line = self.report[0].tolist()
        rows.take(0, end, count, line[: self.k], line[self.k : -1], line[-1])
        rows.forwards += 1
        if not self.readers:
            rows.draft.rewind(rows.ends[0] - 1)

    def keep(self) -> None:
        """Tell the caches on the host what they hold."""
        held = self.rows.ends[0] - 1
        self.rows.cache.advance(held - self.rows.cache.length)
        if self.readers and held > 0:
            cache = self.rows.draft.cache
            cache.advance(max(0, held - 1 - cache.length))

    def _ask(self, end: int, count: int) -> int:
        """Have the draft propose from the host; gives how many."""
        proposal, counts = self.rows.propose([end], [count], None)
        self.raw[:, : counts[0]] = proposal.tokens
        self.count.fill_(counts[0])
        return int(counts[0])

    def _advance(self) -> None:
        rows, k = self.rows, self.k
        uniform = None if self.numbers is None else self.numbers.index_select(0, self.turn)[0]  # [1, 2 k + 1]
        law = None
        if self.readers:
            law = self._guess(uniform)
            self.count.copy_((rows.full - 1 - self.end).clamp(max=k))
        places = self.end + self.offsets  # [k + 1]
        proposed = self.raw.clamp(0, rows.vocab - 1)
        rows.tokens.index_copy_(1, places[:k], proposed)
        logits = self.verifier.read(rows.target, rows.tokens, self.end - 1)  # [1, k + 1, V]
        if uniform is None:
            tokens, accepted = accept_greedy(logits.argmax(-1), self.raw, self.count)
        else:
            tokens, accepted = accept(rows.sampling.law(logits), proposed, uniform[:, k:], law, self.count)
        rows.tokens.index_copy_(1, places, tokens)
        self.report.copy_(torch.cat((self.raw, tokens, accepted[:, None]), 1))
        self.end += accepted + 1
        self.turn += 1

    def _guess(self, uniform: Tensor | None) -> Tensor | None:
        """Write the draft's k tokens to `raw` and their columns; gives the laws [1, k, Vq] of drawn ones."""
        rows, laws = self.rows, []
        draft = rows.draft
        for step in range(self.k):
            reader = self.readers[min(step, 1)]
            at = self.end - 2 if step == 0 else self.end + (step - 1)
            logits = reader.read(draft.model, rows.tokens, at)[:, -1, : rows.vocab]  # [1, Vq]
            if uniform is None or draft.sampling.greedy:
                chosen = logits.argmax(-1)  # [1]
            else:
                laws.append(draft.sampling.law(logits))
                chosen = pick(laws[-1], uniform[:, step : step + 1])
            self.raw[:, step] = chosen
            rows.tokens.index_copy_(1, self.end + step, chosen[:, None])
        return torch.stack(laws, 1) if laws else None
