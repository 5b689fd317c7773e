"""A round as one unit of device work, so that a CUDA graph holds it: draft steps, verification, acceptance.

Launched kernel by kernel, a round of small models waits for the host, as a decode step does
(perf_lab.decode). Here the number of tokens lies on the device, every round has the same shape, and what the
host reads is one row of numbers a round:

shape     gamma proposals in every round; those that would pass the budget do not count. Both caches have
          gamma slots more than the sequence needs.
prompt    read before the first round by a forward of its own, all but its last token: T >= 2.
draft     its first step reads the last two tokens: the cache holds all before them, whatever was accepted.
          One that is no model, or a model that cannot be recorded, proposes from the host as ever.
host      reads a round's report while the device does the next one, where that is sure to come: more is left
          than a round can give. After an eos such a round was for nothing.
kept      recording takes as long as some rounds launched by the host. So a target's last recording is kept,
          with its caches, as long as the target lives, and serves a later call of the same draft, gamma,
          sampling and tensors, that needs no more room. `forget` lets go of all.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from perf_lab.decode import STEPS_BEFORE_RECORDING, Slots, attend, can_step, pages, record
from perf_lab.sampling import pick
from perf_lab.speculative.acceptance import accept, accept_greedy
from perf_lab.speculative.model_draft import ModelDraft

_kept: "weakref.WeakKeyDictionary[Any, Recorded]" = weakref.WeakKeyDictionary()


def forget() -> None:
    """Free the recordings that were kept, and their caches."""
    _kept.clear()


def recorded(rows: Any, numbers: Tensor | None) -> "Recorded | None":
    """The rounds of these rows, a `Rows` at its beginning, as a recording; None where they cannot be one."""
    if not can_record(rows):
        return None
    kept = _kept.pop(rows.target, None)
    rounds = kept if kept is not None and kept.serves(rows, numbers) else Recorded(rows, numbers)
    rounds.begin(rows, numbers)
    return rounds


def can_record(rows: Any) -> bool:
    """Whether these rows have rounds of a form that a graph can hold."""
    return (
        len(rows.ends) == 1
        and rows.pads is None
        and rows.given > 1
        and rows.open()
        and rows.sampling.repetition_penalty is None
        and isinstance(rows.target, torch.nn.Module)
        and can_step(rows.target, rows.cache)
        and not pages(rows.cache)
        and rows.cache.capacity >= rows.full - 1 + rows.gamma
        and (rows.sampling.greedy or steps(rows))
    )


def steps(rows: Any) -> bool:
    """Whether the draft's steps can be part of the graph."""
    draft = rows.draft
    if type(draft) is not ModelDraft or not isinstance(draft.model, torch.nn.Module):
        return False
    whole = can_step(draft.model, draft.cache) and not pages(draft.cache)
    return whole and draft.cache.capacity >= rows.full - 1 + rows.gamma


def tensors_of(*models: Any) -> tuple[Any, ...]:
    """What a recording of these models depends on: where their tensors lie, and their configurations."""
    places: Iterable[Tensor] = (t for m in models for part in (m.parameters(), m.buffers()) for t in part)
    return (*(t.data_ptr() for t in places), *(repr(m.config) for m in models))


class Span(Slots):
    """A cache of one row that takes `width` tokens at a time, at slots that the device knows.

    The model takes them for as many rows of one token, [width, 1]: so its step serves as it is. Row r stands
    in slot at + r, and sees what the slots up to it hold.
    """

    def __init__(self, cache: Any, at: Tensor, width: int) -> None:
        super().__init__(cache, at)
        self.width = width
        self.places = at

    def read(self, model: Any, tokens: Tensor, ladder: Tensor, vocab: int) -> Tensor:
        """Logits [1, width, V] of the columns ladder[: width] of tokens [1, C], ids below vocab; ladder is
        [width + 1 or more] consecutive numbers.
        """
        self.at, self.places, self.seen = ladder[:1], ladder[: self.width], ladder[self.width :][:1]
        now = tokens.index_select(1, self.places)  # [1, width]
        if model.config.vocab_size < vocab:
            now = now.clamp(max=model.config.vocab_size - 1)
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
        seen = attend(q, keys, values, window=window, mask=mask, lengths=self.seen)  # [1, H, width, D]
        return seen.transpose(0, 2)

    def _by_row(self, x: Tensor) -> Tensor:
        _, heads, capacity, dim = x.shape
        strides = x.stride()
        return x.as_strided((self.width, heads, capacity - self.width + 1, dim), (strides[2], *strides[1:]))


class Recorded:
    """The rounds of one row, and the memory that they run in."""

    def __init__(self, rows: Any, numbers: Tensor | None) -> None:
        self.k, self.sampling, self.own = rows.gamma, rows.sampling, steps(rows)
        self.tokens, self.cache = rows.tokens, rows.cache
        device = self.tokens.device
        columns = self.tokens.shape[1]
        self.end = torch.zeros(1, dtype=torch.int64, device=device)  # columns that hold
        self.turn, self.last = torch.zeros_like(self.end), torch.zeros_like(self.end)
        self.raw = torch.zeros(1, self.k, dtype=torch.int64, device=device)  # as proposed, unclamped
        self.count = torch.zeros_like(self.end)
        self.reports = torch.zeros(columns, 2 * self.k + 2, dtype=torch.int64, device=device)  # by round
        self.offsets = torch.arange(-2, self.k + 1, device=device)
        self.kind = None if numbers is None else numbers.dtype
        self.numbers = torch.zeros(columns, 2 * self.k + 1, dtype=self.kind, device=device)
        self.verifier = Span(self.cache, self.end, self.k + 1)
        if self.own:
            self.draft_cache, self.drafts = rows.draft.cache, rows.draft.sampling
            self.model = weakref.ref(rows.draft.model)
            self.readers = [Span(self.draft_cache, self.end, width) for width in (2, 1)]
        self.made_of = self._made_of(rows)
        self.graph: Any = None
        self.warm = self.launched = 0
        if device.type == "cuda":  # what brings a report to the host, beside the next round
            self.stream, self.ended = torch.cuda.Stream(device), [torch.cuda.Event() for _ in range(2)]
            self.host = torch.zeros(2 * self.k + 2, dtype=torch.int64, pin_memory=True)

    def serves(self, rows: Any, numbers: Tensor | None) -> bool:
        """Whether the rounds of these rows are what was recorded."""
        return (
            (self.k, self.sampling, self.own) == (rows.gamma, rows.sampling, steps(rows))
            and self.kind == (None if numbers is None else numbers.dtype)
            and self.tokens.shape[1] >= rows.tokens.shape[1]
            and self.cache.capacity >= rows.cache.capacity
            and (not self.own or (self.model() is rows.draft.model and self.drafts == rows.draft.sampling))
            and (not self.own or self.draft_cache.capacity >= rows.draft.cache.capacity)
            and self.made_of == self._made_of(rows)
        )

    def begin(self, rows: Any, numbers: Tensor | None) -> None:
        """Take rows up, read their prompt; numbers [rounds or more, 1, 2 gamma + 1] where they sample."""
        self.rows, given = rows, rows.given
        self.tokens[:, :given] = rows.tokens[:, :given]
        rows.tokens, rows.cache = self.tokens, self.cache
        self.cache.reset()
        known = self.tokens[:, : given - 1]
        rows.target(known, self.cache, last_only=True)
        if self.own:
            rows.draft.cache = self.draft_cache
            self.draft_cache.reset()
            rows.draft.read(known)
        if numbers is not None:
            rounds = rows.full - given  # at most
            self.numbers[:rounds] = numbers[:rounds, 0]
        self.launched = 0
        self.end.fill_(given)
        self.turn.zero_()
        self.last.fill_(rows.full - 1)

    def round(self) -> None:
        """One round, and what it gave to the rows. If another one is sure to follow, the device begins it
        before the host reads this one.
        """
        rows, turn = self.rows, self.rows.forwards
        end = rows.ends[0]
        count = min(self.k, rows.full - end - 1)
        if not self.own:
            count = self._ask(end, count)
        if self.launched == turn:
            self._launch()
        if self.own and rows.full - end > self.k + 1:
            self._launch()
        line = self._report(turn)
        rows.take(0, end, count, line[: self.k], line[self.k : -1], line[-1])
        rows.forwards += 1
        if not self.own:
            rows.draft.rewind(rows.ends[0] - 1)

    def keep(self) -> None:
        """Tell the caches on the host what they hold, and keep what was recorded for the next call."""
        held = self.rows.ends[0] - 1
        self.cache.advance(held - self.cache.length)
        if self.own:
            self.draft_cache.advance(max(0, held - 1 - self.draft_cache.length))
        _kept[self.rows.target] = self
        self.rows = None

    def _made_of(self, rows: Any) -> tuple[Any, ...]:
        return tensors_of(rows.target, *([rows.draft.model] if self.own else []))

    def _ask(self, end: int, count: int) -> int:
        """Have the draft propose from the host; gives how many."""
        proposal, counts = self.rows.propose([end], [count], None)
        self.raw[:, : counts[0]] = proposal.tokens
        self.count.fill_(counts[0])
        return int(counts[0])

    def _launch(self) -> None:
        """Put the next round on the device's queue."""
        if self.graph is not None:
            self.graph.replay()
        elif self.tokens.is_cuda and self.warm >= STEPS_BEFORE_RECORDING:
            self.graph = record(self._advance)
            self.graph.replay()
        else:
            self._advance()
            self.warm += 1
        if self.tokens.is_cuda:
            self.ended[self.launched % 2].record()
        self.launched += 1

    def _report(self, turn: int) -> list[int]:
        """What the round of this number reported: its proposals, its tokens, how many were accepted."""
        if not self.tokens.is_cuda:
            return self.reports[turn].tolist()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.ended[turn % 2])
            self.host.copy_(self.reports[turn], non_blocking=True)
            self.stream.synchronize()
        return self.host.tolist()

    def _advance(self) -> None:
        rows, k, tokens = self.rows, self.k, self.tokens
        ladder = self.end + self.offsets  # end - 2 .. end + k
        uniform = None if self.sampling.greedy else self.numbers.index_select(0, self.turn)  # [1, 2 k + 1]
        law, proposed = None, self.raw
        if self.own:
            law = self._guess(ladder, uniform)
            self.raw.copy_(tokens.index_select(1, ladder[2 : k + 2]))
            torch.clamp(self.last - self.end, max=k, out=self.count)
        else:
            proposed = self.raw.clamp(0, rows.vocab - 1)
            tokens.index_copy_(1, ladder[2 : k + 2], proposed)
        logits = self.verifier.read(rows.target, tokens, ladder[1:], rows.vocab)  # [1, k + 1, V]
        if uniform is None:
            chosen, accepted = accept_greedy(logits.argmax(-1), self.raw, self.count)
        else:
            chosen, accepted = accept(self.sampling.law(logits), proposed, uniform[:, k:], law, self.count)
        tokens.index_copy_(1, ladder[2:], chosen)
        self.reports.index_copy_(0, self.turn, torch.cat((self.raw, chosen, accepted[:, None]), 1))
        self.end += accepted
        self.end += 1
        self.turn += 1

    def _guess(self, ladder: Tensor, uniform: Tensor | None) -> Tensor | None:
        """Write the draft's k tokens to their columns; gives the laws [1, k, Vq] of those that were drawn."""
        rows, laws = self.rows, []
        draft = rows.draft
        for step in range(self.k):
            reader, steps_up = self.readers[min(step, 1)], ladder[step + 1 if step else 0 :]
            logits = reader.read(draft.model, self.tokens, steps_up, rows.vocab)[:, -1, : rows.vocab]
            if uniform is None or self.drafts.greedy:
                chosen = logits.argmax(-1)  # [1]
            else:
                laws.append(self.drafts.law(logits))
                chosen = pick(laws[-1], uniform[:, step : step + 1])
            self.tokens.index_copy_(1, ladder[step + 2 : step + 3], chosen[:, None])
        return torch.stack(laws, 1) if laws else None
