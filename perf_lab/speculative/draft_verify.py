"""The loop: propose, verify in one forward of the target, keep what it accepts and one token more, rewind.

Rows accept different numbers, while a cache has one length for all. It is cut to what the slowest row knows,
and a faster row's tokens from there on are read again, beside its new proposals, in the next forward: each
row stands in its own columns, so that nothing is moved. A forward takes WINDOW gamma + 1 tokens at most; a
row that is ahead proposes what fits, and always gets on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perf_lab.generate import left_padding
from perf_lab.sampling import Sampling, seen_ids
from perf_lab.speculative import DTYPES, GREEDY, Draft, ModelDraft, Proposal, Result, Round, speculative
from perf_lab.speculative.acceptance import accept, accept_greedy
from perf_lab.speculative.recorded import recorded

WINDOW = 2  # gammas
MOST_LOGITS = 2**26  # of a prompt, at once: 128 MB in half precision


@speculative.register("draft_verify", dtypes=DTYPES)
@torch.no_grad()
def draft_verify(
    target: Any,
    draft: Any,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    gamma: int = 4,
    eos: int | None = None,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    uniform: Tensor | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    graph: bool | None = False,
) -> Result:
    """Speculative decoding of prompt [B, T], as the contract in perf_lab.speculative says."""
    wanted = prompt.is_cuda if graph is None else graph
    draft = draft if isinstance(draft, Draft) else ModelDraft(draft)
    slack = gamma if wanted else 0
    rows = Rows(target, draft, prompt, max_new_tokens, gamma, eos, sampling, lengths, slack)
    numbers = None
    if not sampling.greedy:
        numbers = draw(max_new_tokens, prompt, gamma, generator) if uniform is None else uniform
    device_rounds = recorded(rows, numbers) if wanted else None
    while rows.open():
        if device_rounds is not None:
            device_rounds.round()
        else:
            rows.round(None if numbers is None else numbers[rows.forwards])
    if device_rounds is not None:
        device_rounds.keep()
    return rows.result()


@speculative.register("recorded", dtypes=DTYPES)
def recorded_rounds(*args: Any, **how: Any) -> Result:
    """The rounds by `perf_lab.speculative.recorded`, where models and caches can."""
    return draft_verify(*args, **{"graph": True, **how})


def draw(rounds: int, prompt: Tensor, gamma: int, generator: torch.Generator | None) -> Tensor:
    """The numbers of all rounds, [rounds, B, 2 gamma + 1], on the prompt's device."""
    source = generator.device if generator is not None else "cpu"
    shape = (rounds, prompt.shape[0], 2 * gamma + 1)
    return torch.rand(shape, generator=generator, device=source).to(prompt.device)


class Rows:
    """The sequences under way: tokens [B, C], of which row b's first ends[b] hold, and both caches."""

    def __init__(
        self,
        target: Any,
        draft: Draft,
        prompt: Tensor,
        new: int,
        gamma: int,
        eos: int | None,
        sampling: Sampling,
        lengths: Sequence[int] | Tensor | None,
        slack: int = 0,
    ) -> None:
        self.target, self.draft, self.gamma, self.eos, self.sampling = target, draft, gamma, eos, sampling
        batch, given = prompt.shape
        self.vocab, self.given, self.full = target.config.vocab_size, given, given + new
        self.ends, self.ended = [given] * batch, [new == 0] * batch
        self.rounds: list[Round] = []
        self.forwards = 0
        self.pads = None if lengths is None else left_padding(prompt, lengths)
        columns = self.full + gamma + 1
        if slack:  # a recording serves sequences of other lengths too
            columns += -columns % 64
            slack = columns - self.full
        self.tokens = torch.cat((prompt, prompt.new_zeros(batch, columns - given)), 1)  # [B, C]
        capacity = max(0, self.full - 1)  # the last token is never computed
        # a recorded round runs past the end; a slow row proposes while a fast one is about to end
        more = max(slack, gamma if batch > 1 else 0)
        if batch > 1 or not sampling.greedy or self.pads is not None:
            draft.start(self.vocab, capacity + more, batch, self.pads, sampling)
        else:
            draft.start(self.vocab, capacity + more)
        self.cache = target.new_cache(batch, min(capacity + slack, target.config.max_length))

    def open(self) -> bool:
        """Whether a row is still to go on."""
        return not all(self.ended)

    def round(self, uniform: Tensor | None) -> None:
        """One forward of the target, with numbers [B, 2 gamma + 1] where it samples."""
        going = [row for row, ended in enumerate(self.ended) if not ended]
        low = min(self.ends[row] for row in going)
        ends = [max(low, end) for end in self.ends]  # where a row ended does not matter
        wanted = [
            0 if ended else min(self.gamma, low + WINDOW * self.gamma - end, self.full - end - 1)
            for end, ended in zip(ends, self.ended, strict=True)
        ]
        self._prefill(low - 1)
        proposal, counts = self.propose(ends, wanted, uniform)
        k = proposal.tokens.shape[1]
        width = max(ends[row] + counts[row] for row in going) - self.cache.length
        self._place(proposal.tokens.clamp(0, self.vocab - 1), ends)
        logits = self._forward(width, ends, k)  # [B, k + 1, V]
        tokens, accepted = self._accept(logits, proposal, ends, counts, uniform)
        self._read(proposal.tokens, tokens, accepted, ends, counts, going)
        self._place(tokens, ends)
        self.forwards += 1
        low = min((self.ends[row] for row in going if not self.ended[row]), default=min(self.ends)) - 1
        self.cache.truncate(low)
        self.draft.rewind(low)

    def result(self) -> Result:
        """The rows, those that ended early filled up with eos."""
        longest = max(self.ends)
        tokens = self.tokens[:, :longest].clone()
        for row, end in enumerate(self.ends):
            if end < longest and self.eos is not None:
                tokens[row, end:] = self.eos
        return Result(tokens, tuple(self.rounds), self.forwards)

    def propose(
        self, ends: list[int], wanted: list[int], uniform: Tensor | None
    ) -> tuple[Proposal, list[int]]:
        """What the draft proposes, and how many of each row are to be looked at."""
        k, batch = max(wanted), len(ends)
        if k == 0:
            return Proposal(self.tokens[:, :0]), [0] * batch
        committed = self.tokens[:, : max(ends)]
        if batch == 1 and uniform is None:
            proposed = self.draft.propose(committed, k)
        else:
            proposed = self.draft.propose(committed, k, ends, None if uniform is None else uniform[:, :k])
        proposal = proposed if isinstance(proposed, Proposal) else Proposal(proposed)
        check_proposal(proposal, self.tokens, k, self.vocab)
        most = proposal.counts or [proposal.tokens.shape[1]] * batch
        counts = [min(pair) for pair in zip(wanted, most, strict=True)]
        return proposal.first(max(counts)), counts

    def _place(self, tokens: Tensor, ends: list[int]) -> None:
        """Write tokens [B, n] behind the rows' ends."""
        if min(ends) == max(ends):
            self.tokens[:, ends[0] : ends[0] + tokens.shape[1]] = tokens
        else:
            self.tokens.scatter_(1, self._columns(ends, 0, tokens.shape[1]), tokens)

    def _columns(self, ends: list[int], shift: int, count: int) -> Tensor:
        """Columns ends[b] - shift, ..., [B, count]."""
        first = torch.tensor([[end - shift] for end in ends], device=self.tokens.device)
        return first + torch.arange(count, device=self.tokens.device)

    def _prefill(self, known: int) -> None:
        """Have the target read a long prompt for its last logits alone: all of them take much memory."""
        new = self.tokens[:, self.cache.length : known]
        if new.numel() * self.vocab > MOST_LOGITS:
            how = {} if self.pads is None else {"pads": self.pads}
            self.target(new, self.cache, last_only=True, **how)

    def _forward(self, width: int, ends: list[int], k: int) -> Tensor:
        """The target's logits [B, k + 1, V] after each row's last token and each of its proposals."""
        start = self.cache.length
        how = {} if self.pads is None else {"pads": self.pads}
        new = self.tokens[:, start : start + width]
        if width > 1 and k == 0 and min(ends) == max(ends):
            return self.target(new, self.cache, last_only=True, **how)
        logits = self.target(new, self.cache, **how)  # [B, width, V]
        if min(ends) == max(ends):
            return logits[:, ends[0] - 1 - start :]
        places = self._columns(ends, 1 + start, k + 1).clamp(max=width - 1)
        return logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))

    def _accept(
        self, logits: Tensor, proposal: Proposal, ends: list[int], counts: list[int], uniform: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The tokens [B, k + 1] of a round, and how many of the proposals are among them, [B]."""
        k, sampling = proposal.tokens.shape[1], self.sampling
        proposed = proposal.tokens.clamp(0, self.vocab - 1)
        limit = None if min(counts) == k else torch.tensor(counts).to(logits.device)
        seen = None if sampling.repetition_penalty is None else self._seen(proposed, ends)
        if sampling.greedy or uniform is None:
            choices = sampling.best(logits, seen)
            return accept_greedy(choices, proposal.tokens, limit)
        tests = uniform[:, self.gamma : self.gamma + k]
        numbers = torch.cat((tests, uniform[:, 2 * self.gamma :]), 1)  # [B, k + 1]
        return accept(sampling.law(logits, seen), proposed, numbers, proposal.law, limit)

    def _seen(self, proposed: Tensor, ends: list[int]) -> Tensor:
        """The ids before each place of a round, [B, k + 1, V] bool."""
        rows = [
            seen_ids(self.tokens[row : row + 1, :end], self.vocab, self._pad_of(row))
            for row, end in enumerate(ends)
        ]
        marks = torch.nn.functional.one_hot(proposed, self.vocab).cumsum(1) > 0  # [B, k, V]
        return torch.cat(rows)[:, None] | torch.nn.functional.pad(marks, (0, 0, 1, 0))

    def _pad_of(self, row: int) -> Tensor | None:
        return None if self.pads is None else self.pads[row : row + 1]

    def _read(
        self,
        proposed: Tensor,
        tokens: Tensor,
        accepted: Tensor,
        ends: list[int],
        counts: list[int],
        going: list[int],
    ) -> None:
        """All on the host, in one copy: a round's only wait for the device.

        Raises ValueError for a proposal outside the vocabulary: a GPU must not be asked to look it up, so
        that it was read as one inside.
        """
        k = proposed.shape[1]
        for row, line in enumerate(torch.cat((proposed, tokens, accepted[:, None]), 1).tolist()):
            if row in going:
                self.take(row, ends[row], counts[row], line[:k], line[k:-1], line[-1])

    def take(
        self, row: int, end: int, count: int, proposed: list[int], tokens: list[int], accepted: int
    ) -> None:
        """Note what a round gave to a row of `end` tokens: `accepted` of `count` proposals, and one more."""
        for guess in proposed[:count]:
            if not 0 <= guess < self.vocab:
                ids = f"0 to {self.vocab - 1}, the target's vocabulary"
                raise ValueError(f"draft: proposed the id {guess}, accepted are {ids}")
        emitted, kept = cut(tokens, accepted, self.eos)
        self.rounds.append(Round(count, kept, emitted, row))
        self.ends[row] = end + emitted
        self.ended[row] = self.ends[row] == self.full or tokens[emitted - 1] == self.eos


def cut(tokens: list[int], accepted: int, eos: int | None) -> tuple[int, int]:
    """How many of a round's tokens are emitted, up to the first eos, and how many of these were proposed."""
    emitted = accepted + 1
    if eos in tokens[:emitted]:
        emitted = tokens.index(eos) + 1
    return emitted, min(accepted, emitted)


def check_proposal(proposal: Proposal, tokens: Tensor, k: int, vocab: int) -> None:
    """Raise TypeError or ValueError unless it is up to k ids a row [B, <= k], with laws that fit."""
    proposed, batch = proposal.tokens, tokens.shape[0]
    if not isinstance(proposed, Tensor) or proposed.dtype != torch.int64:
        got = proposed.dtype if isinstance(proposed, Tensor) else type(proposed).__name__
        raise TypeError(f"draft: proposed {got}, accepted is a Tensor of torch.int64")
    if proposed.ndim != 2 or proposed.shape[0] != batch or proposed.shape[1] > k:
        raise ValueError(f"draft: proposed shape {tuple(proposed.shape)}, accepted is [{batch}, up to {k}]")
    if proposed.device != tokens.device:
        raise ValueError(
            f"draft: proposed a tensor on {proposed.device}, accepted is the prompt's {tokens.device}"
        )
    law = proposal.law
    if law is not None and (law.shape[:2] != proposed.shape or law.shape[2] > vocab):
        accepted = f"[{batch}, {proposed.shape[1]}, up to {vocab}]"
        raise ValueError(f"draft: proposed by laws of shape {tuple(law.shape)}, accepted is {accepted}")
    if proposal.counts is not None and not all(0 <= n <= proposed.shape[1] for n in proposal.counts):
        raise ValueError(f"draft: proposed counts {proposal.counts}, accepted are 0 to {proposed.shape[1]}")
