"""Wrong batches, recorded rounds and look-ups, each right but for one fault."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from perf_lab.speculative import PromptLookup, Result, prompt_lookup, speculative
from perf_lab.speculative.draft_verify import Rows, draft_verify
from perf_lab.speculative.model_draft import ModelDraft
from perf_lab.speculative.recorded import Recorded, Span

from . import mutant

ALONE = "test_speculative_drafts::test_each_row_of_a_batch_gets_what_it_gets_alone"
UNEQUAL = "test_speculative_drafts::test_rows_of_unequal_length_get_what_they_get_alone"
SAME = "test_speculative_sampled::test_the_same_numbers_give_the_same_rounds_by_every_way"
LOOKED_UP = "test_speculative_drafts::test_a_look_up_changes_no_token"
LOOK_UP = "test_speculative_drafts::test_a_look_up_proposes_what_followed_the_longest_latest_match"


def wrong(where: str, killed_by: str | tuple[str, ...], **how: Any) -> Callable[[type], type]:
    """Declare a mutant: `draft_verify` with this class in the place of the one it uses."""

    def add(fault: type) -> type:
        def run(*args: Any, **kwargs: Any) -> Result:
            with mock.patch(f"perf_lab.speculative.{where}", fault):
                return draft_verify(*args, **{**kwargs, **how})

        run.__name__, run.__doc__ = fault.__name__, fault.__doc__
        mutant(speculative, killed_by)(run)
        return fault

    return add


@wrong("draft_verify.Rows", (ALONE, LOOKED_UP))
class EndOfTheFirstRow(Rows):
    """What is written behind a row's end is written behind the first row's."""

    def _place(self, tokens: Tensor, ends: list[int]) -> None:
        super()._place(tokens, [ends[0]] * len(ends))


@wrong("draft_verify.Rows", ALONE)
class ChoicesOfTheSlowestRow(Rows):
    """Every row takes the logits at the slowest row's end."""

    def _columns(self, ends: list[int], shift: int, count: int) -> Tensor:
        return super()._columns([min(ends)] * len(ends) if shift else ends, shift, count)


@wrong("draft_verify.Rows", ALONE)
class EndedRowsGoOn(Rows):
    """A row that gave eos goes on until all have."""

    def take(self, row: int, *what: Any) -> None:
        super().take(row, *what)
        self.ended[row] = self.ends[row] == self.full


@wrong("draft_verify.Rows", ALONE)
class OneEosEndsAll(Rows):
    """The first eos of any row ends all rows."""

    def open(self) -> bool:
        return not any(self.ended)


@wrong("draft_verify.Rows", UNEQUAL)
class PaddingSeen(Rows):
    """The target sees the padding."""

    def _forward(self, width: int, ends: list[int], k: int) -> Tensor:
        with mock.patch.object(self, "pads", None):
            return super()._forward(width, ends, k)


@wrong("draft_verify.Rows", "test_speculative_drafts::test_a_repetition_penalty_is_the_targets")
class ProposalsAreNotSeen(Rows):
    """The penalty of a place does not count the proposals before it."""

    def _seen(self, proposed: Tensor, ends: list[int]) -> Tensor:
        return super()._seen(proposed, ends)[:, :1].expand(-1, proposed.shape[1] + 1, -1)


@mutant(speculative, killed_by="test_speculative_drafts::test_a_forward_computes_a_bounded_number_of_tokens")
def rows_run_away(*args: Any, **kwargs: Any) -> Result:
    """A row may be ahead of the slowest by any number of tokens."""
    with mock.patch("perf_lab.speculative.draft_verify.WINDOW", 99):
        return draft_verify(*args, **kwargs)


@mutant(
    speculative,
    killed_by="test_speculative_drafts::test_the_target_as_a_draft_of_unequal_rows_is_always_accepted",
)
def draft_sees_the_padding(*args: Any, **kwargs: Any) -> Result:
    """The draft is not told of the padding: its proposals are made from other sequences."""
    start = ModelDraft.start

    def unpadded(self: ModelDraft, v: int, c: int, batch: int = 1, pads: Any = None, *more: Any) -> None:
        start(self, v, c, batch, None, *more)

    with mock.patch.object(ModelDraft, "start", unpadded):
        return draft_verify(*args, **kwargs)


@wrong("recorded.Span", "test_speculative::test_emits_the_tokens_of_greedy_decoding", graph=True)
class StaleLength(Span):
    """The recorded forward does not see its own last token."""

    def look(self, layer: int, q: Tensor, **how: Any) -> Tensor:
        self.seen = self.at + (self.width - 1)
        return super().look(layer, q, **how)


@wrong("recorded.Recorded", SAME, graph=True)
class NumbersOfTheFirstRound(Recorded):
    """The recorded round uses the same numbers every time."""

    def _advance(self) -> None:
        self.turn.zero_()
        super()._advance()


@wrong(
    "recorded.Recorded",
    "test_speculative::test_the_target_as_its_own_draft_is_always_accepted",
    graph=True,
)
class RecordedDraftReadsOneToken(Recorded):
    """The draft's first step reads the last token alone: after a round that accepted all it lacks one."""

    def _guess(self, ladder: Tensor, uniform: Tensor | None) -> Tensor | None:
        last = torch.cat((ladder[1:2], ladder[1:2] + 1, ladder[2:]))  # end - 1, end, end, end + 1, ...
        self.readers[0] = self.readers[1]
        return super()._guess(last, uniform)


@wrong("recorded.Recorded", SAME, graph=True)
class BudgetOfTheFirstCall(Recorded):
    """A recording that is used again keeps the budget that it was made for."""

    def begin(self, rows: Any, numbers: Any) -> None:
        before = self.last.clone()
        super().begin(rows, numbers)
        if before:
            self.last.copy_(before)


@wrong("recorded.Recorded", SAME, graph=True)
class PromptOfTheFirstCall(Recorded):
    """A recording that is used again does not read the new prompt."""

    def begin(self, rows: Any, numbers: Any) -> None:
        if self.warm and self.tokens[:, : rows.given].shape == rows.tokens[:, : rows.given].shape:
            rows.tokens = self.tokens
        super().begin(rows, numbers)


@mutant(prompt_lookup, killed_by=LOOK_UP)
class FirstMatch(PromptLookup):
    """The earliest match is taken, not the latest."""

    def _learn(self, row: int, new: list[int]) -> None:
        for token in new:
            text = self.texts[row]
            for size in range(self.shortest, min(self.longest, len(text)) + 1):
                self.places[row].setdefault(tuple(text[-size:]), len(text))
            text.append(token)


@mutant(prompt_lookup, killed_by=LOOK_UP)
class ShortestFirst(PromptLookup):
    """The shortest suffix is looked up first, and is found more often."""

    def _follows(self, row: int, k: int) -> list[int]:
        longest, self.longest = self.longest, self.shortest
        try:
            return super()._follows(row, k)
        finally:
            self.longest = longest


@mutant(prompt_lookup, killed_by=LOOK_UP)
class MatchIncluded(PromptLookup):
    """The proposal begins with the last token of the match, which is there already."""

    def _follows(self, row: int, k: int) -> list[int]:
        for size in range(min(self.longest, len(self.texts[row])), self.shortest - 1, -1):
            place = self.places[row].get(tuple(self.texts[row][-size:]))
            if place is not None:
                return self.texts[row][place - 1 : place - 1 + k]
        return []


@mutant(prompt_lookup, killed_by=LOOK_UP)
class LearnsTwice(PromptLookup):
    """The last token of each round is noted twice."""

    def _learn(self, row: int, new: list[int]) -> None:
        super()._learn(row, new + new[-1:])


@mutant(speculative, "test_speculative_drafts::test_a_long_prompt_is_read_without_its_logits")
def prompts_logits(*args: Any, **kwargs: Any) -> Result:
    """The logits of all of a prompt are computed, whatever its length."""
    with mock.patch("perf_lab.speculative.draft_verify.MOST_LOGITS", 2**40):
        return draft_verify(*args, **kwargs)


def mended(mend: Callable[[Any, Tensor], None]) -> Callable[..., Result]:
    """Speculate with proposals that `mend` makes fit, in the place of the check that they do."""

    def run(*args: Any, **kwargs: Any) -> Result:
        def check(proposal: Any, tokens: Tensor, *ask: Any) -> None:
            mend(proposal, tokens)

        with mock.patch("perf_lab.speculative.draft_verify.check_proposal", check):
            return draft_verify(*args, **kwargs)

    return run


@mutant(speculative, "test_speculative_drafts::test_refuses_counts_that_do_not_fit")
def counts_cut(*args: Any, **kwargs: Any) -> Result:
    """Counts that a proposal cannot have are brought to those that it can."""

    def mend(proposal: Any, tokens: Tensor) -> None:
        counts = [min(max(n, 0), proposal.tokens.shape[1]) for n in proposal.counts]
        object.__setattr__(proposal, "counts", counts)

    return mended(mend)(*args, **kwargs)


@mutant(speculative, "test_speculative_sampled::test_refuses_laws_that_do_not_fit")
def laws_dropped(*args: Any, **kwargs: Any) -> Result:
    """A law of the wrong shape is passed over, and the draft taken to have been certain."""

    def mend(proposal: Any, tokens: Tensor) -> None:
        object.__setattr__(proposal, "law", None)

    return mended(mend)(*args, **kwargs)
