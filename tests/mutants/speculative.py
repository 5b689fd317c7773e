"""Wrong speculative decoders: a right loop of small parts, and mutants with one of them wrong.

Most of these faults were shipped by well-known libraries. The tokens alone show few of them: a loop that
rewinds too far, or forgets to rewind its draft, still gives the right ones, only later.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perf_lab.speculative import Draft, ModelDraft, Result, Round, speculative

from . import mutant, unguarded


class Loop:
    """Draft and verify, right; each subclass has one fault."""

    slack = 0  # slots of the caches that only a wrong loop needs
    drafter = ModelDraft

    @classmethod
    def call(
        cls, target: Any, draft: Any, prompt: Tensor, new: int, *, gamma: int = 4, eos: int | None = None
    ) -> Result:
        """Decode with a fresh loop."""
        loop = cls()
        loop.target, loop.gamma, loop.eos, loop.tokens = target, gamma, eos, prompt
        loop.end = prompt.shape[1] + new
        loop.draft = draft if isinstance(draft, Draft) else cls.drafter(draft)
        loop.draft.start(target.config.vocab_size, loop.end + cls.slack)
        loop.cache = target.new_cache(1, loop.end + cls.slack)
        return loop.run()

    @torch.no_grad()
    def run(self) -> Result:
        rounds, last = [], -1
        while self.left() > 0 and last != self.eos:
            before, k = self.tokens.shape[1], self.ask()
            proposed = self.draft.propose(self.tokens, k) if k else self.tokens[:, :0]
            new = self.tokens[:, self.cache.length :]
            logits = self.target(torch.cat((new, proposed), 1), self.cache)
            choices = self.choose(logits[:, new.shape[1] - 1 :])
            guesses, chosen = self.read(proposed), self.read(choices)
            agreed = self.agree(guesses, chosen)
            emitted = self.cut(self.emit(guesses, chosen, agreed))
            self.tokens = torch.cat((self.tokens, torch.tensor([emitted], dtype=torch.int64)), 1)
            last = self.last(emitted)
            rounds.append(self.count(len(guesses), min(agreed, len(emitted)), len(emitted)))
            self.rewind_target(before)
            self.rewind_draft(before)
        return Result(self.tokens, tuple(rounds))

    def left(self) -> int:
        return self.end - self.tokens.shape[1]

    def ask(self) -> int:
        return min(self.gamma, self.left() - 1)

    def choose(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def read(self, ids: Tensor) -> list[int]:
        return ids[0].tolist()

    def agree(self, guesses: list[int], chosen: list[int]) -> int:
        return next((i for i, guess in enumerate(guesses) if guess != chosen[i]), len(guesses))

    def emit(self, guesses: list[int], chosen: list[int], agreed: int) -> list[int]:
        return chosen[: agreed + 1]

    def cut(self, emitted: list[int]) -> list[int]:
        return emitted[: emitted.index(self.eos) + 1] if self.eos in emitted else emitted

    def last(self, emitted: list[int]) -> int:
        return emitted[-1]

    def count(self, drafted: int, accepted: int, emitted: int) -> Round:
        return Round(drafted, accepted, emitted)

    def rewind_target(self, before: int) -> None:
        self.cache.truncate(self.tokens.shape[1] - 1)

    def rewind_draft(self, before: int) -> None:
        self.draft.rewind(self.tokens.shape[1] - 1)


def wrong(*killed_by: str) -> Callable[[type[Loop]], type[Loop]]:
    """Declare a faulty loop a mutant, killed by each of these properties of tests/test_speculative.py."""

    def add(loop: type[Loop]) -> type[Loop]:
        def call(*args: Any, **kwargs: Any) -> Result:
            return loop.call(*args, **kwargs)

        call.__name__, call.__doc__ = loop.__name__, loop.__doc__
        call.of_the_loop = True
        mutant(speculative, tuple(f"test_speculative::{name}" for name in killed_by))(call)
        return loop

    return add


@wrong("test_emits_the_tokens_of_greedy_decoding", "test_a_draft_of_any_size_and_vocabulary_changes_no_token")
class AlwaysAccepts(Loop):
    """Every proposal is believed."""

    def emit(self, guesses: list[int], chosen: list[int], agreed: int) -> list[int]:
        return guesses + chosen[len(guesses) :]


@wrong("test_an_always_wrong_draft_is_never_believed")
class FirstTokenUnverified(Loop):
    """The first proposal is committed without a look at the target's choice."""

    def emit(self, guesses: list[int], chosen: list[int], agreed: int) -> list[int]:
        return guesses[:1] + chosen[1 : agreed + 1] if agreed else guesses[:1] or chosen[:1]


@wrong("test_an_always_wrong_draft_is_never_believed")
class VerifiedAgainstTheNextChoice(Loop):
    """Proposals are compared with the choices one place further on."""

    def agree(self, guesses: list[int], chosen: list[int]) -> int:
        return super().agree(guesses, chosen[1:])


@wrong("test_emits_the_tokens_of_greedy_decoding")
class LogitsOfTheTokenBefore(Loop):
    """The choices of a round are one place behind: those at the proposals, not after them."""

    def choose(self, logits: Tensor) -> Tensor:
        best = super().choose(logits)
        return best if best.shape[1] == 1 else torch.cat((best[:, :1], best[:, :-1]), 1)


@wrong("test_emits_the_tokens_of_greedy_decoding")
class CorrectionIsTheProposal(Loop):
    """After the accepted prefix comes the wrong proposal itself, not the target's choice."""

    def emit(self, guesses: list[int], chosen: list[int], agreed: int) -> list[int]:
        return guesses[: agreed + 1] if agreed < len(guesses) else chosen


@wrong("test_rounds_say_what_happened")
class AcceptsBehindAMistake(Loop):
    """Proposals behind a wrong one still count as accepted where they happen to agree."""

    def agree(self, guesses: list[int], chosen: list[int]) -> int:
        self.agreeing = sum(guess == choice for guess, choice in zip(guesses, chosen, strict=False))
        return super().agree(guesses, chosen)

    def count(self, drafted: int, accepted: int, emitted: int) -> Round:
        return Round(drafted, self.agreeing, emitted)


@wrong("test_the_target_as_its_own_draft_is_always_accepted")
class BonusDropped(Loop):
    """Where all proposals are right, the token that the target adds to them is thrown away."""

    def emit(self, guesses: list[int], chosen: list[int], agreed: int) -> list[int]:
        return chosen[: max(1, len(guesses))] if agreed == len(guesses) else chosen[: agreed + 1]


@wrong("test_the_target_cache_holds_all_but_the_last_committed_token")
class TargetRewoundOneTooMany(Loop):
    """The target's cache loses one committed token too many a round, and computes it again."""

    def rewind_target(self, before: int) -> None:
        self.cache.truncate(max(0, self.tokens.shape[1] - 2))


@wrong("test_the_target_cache_holds_all_but_the_last_committed_token")
class TargetRewoundOneTooFew(Loop):
    """The target's cache keeps one entry of a rejected proposal."""

    def rewind_target(self, before: int) -> None:
        self.cache.truncate(min(self.cache.length, self.tokens.shape[1]))


@wrong("test_the_target_cache_holds_all_but_the_last_committed_token")
class PositionAdvancesByOne(Loop):
    """The position of the target moves on by one a round, however many tokens were committed."""

    def rewind_target(self, before: int) -> None:
        self.cache.truncate(before)


@wrong("test_the_draft_cache_holds_what_was_read_and_committed")
class DraftNotRewound(Loop):
    """The draft keeps what it read of its rejected proposals."""

    def rewind_draft(self, before: int) -> None:
        pass


@wrong("test_the_draft_cache_holds_what_was_read_and_committed")
class DraftRewoundTwoTooMany(Loop):
    """The draft's context falls two tokens behind in each round, and is read again."""

    def rewind_draft(self, before: int) -> None:
        self.draft.rewind(max(0, self.tokens.shape[1] - 3))


@wrong("test_the_target_as_its_own_draft_is_always_accepted")
class DraftReadsOneToken(Loop):
    """After a round that accepted everything the draft is not given the proposal that it never read."""

    class Behind(ModelDraft):
        def propose(self, committed: Tensor, k: int) -> Tensor:
            start = self.cache.length
            if start and committed.shape[1] - start == 2:
                committed = torch.cat((committed[:, :start], committed[:, -1:]), 1)
            return super().propose(committed, k)

    drafter = Behind


@wrong("test_ends_with_the_first_eos_wherever_it_falls")
class EosOnlyAtTheEnd(Loop):
    """Only the last token of a round is looked at for eos."""

    def cut(self, emitted: list[int]) -> list[int]:
        return emitted


@wrong("test_ends_with_the_first_eos_wherever_it_falls")
class EosDropped(Loop):
    """What comes before eos is kept, eos is not."""

    def cut(self, emitted: list[int]) -> list[int]:
        return emitted[: emitted.index(self.eos)] if self.eos in emitted else emitted

    def last(self, emitted: list[int]) -> int:
        return emitted[-1] if emitted else self.eos


@wrong("test_ends_with_the_first_eos_wherever_it_falls", "test_an_eos_that_never_comes_ends_nothing")
class EosInTheProposalsEndsIt(Loop):
    """An eos that the draft proposed ends the sequence, although the target rejected it."""

    def agree(self, guesses: list[int], chosen: list[int]) -> int:
        self.proposed_eos = self.eos in guesses
        return super().agree(guesses, chosen)

    def last(self, emitted: list[int]) -> int:
        return self.eos if self.proposed_eos else emitted[-1]


@wrong("test_ends_with_the_first_eos_wherever_it_falls")
class EosIsNotCut(Loop):
    """A round that holds eos is the last one, and is emitted whole."""

    def cut(self, emitted: list[int]) -> list[int]:
        return emitted

    def last(self, emitted: list[int]) -> int:
        return self.eos if self.eos in emitted else emitted[-1]


@wrong("test_never_more_tokens_than_asked_for")
class BudgetOverrun(Loop):
    """A round is begun whole while one token is left of the budget, and emitted whole."""

    slack = 9

    def ask(self) -> int:
        return self.gamma


@wrong("test_never_more_tokens_than_asked_for")
class BonusIsOnTop(Loop):
    """The budget bounds the proposals and forgets the bonus behind them."""

    slack = 1

    def ask(self) -> int:
        return min(self.gamma, self.left())


@wrong("test_never_more_tokens_than_asked_for")
class StopsBeforeAShortRound(Loop):
    """What is left of the budget is not generated when it is less than a round."""

    def left(self) -> int:
        left = super().left()
        return left if left > self.gamma else 0


@wrong("test_rounds_say_what_happened")
class DraftedCountedAsEmitted(Loop):
    """The statistics take every proposal for a token of the result."""

    def count(self, drafted: int, accepted: int, emitted: int) -> Round:
        return Round(drafted, accepted, drafted + 1)


@wrong("test_of_equal_logits_the_lowest_id_wins")
class HighestIdWins(Loop):
    """Of equal logits the highest id is taken."""

    def choose(self, logits: Tensor) -> Tensor:
        return logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)


@wrong("test_in_any_dtype_a_token_is_the_best_within_rounding")
class ChoosesFromRoundedLogits(Loop):
    """The target's logits are rounded to 8 bits of mantissa before the choice."""

    def choose(self, logits: Tensor) -> Tensor:
        return logits.bfloat16().argmax(-1)


@wrong("test_the_host_waits_once_a_round")
class ReadsTokenByToken(Loop):
    """Each token is brought to the host by itself."""

    def read(self, ids: Tensor) -> list[int]:
        return [int(token) for token in ids[0]]


@wrong("test_a_draft_of_shorter_context_changes_no_token")
class DraftMustAlwaysPropose(Loop):
    """Where the draft's context ends, the sequence ends too."""

    class Ending(ModelDraft):
        full = False

        def propose(self, committed: Tensor, k: int) -> Tensor:
            proposed = super().propose(committed, k)
            self.full = proposed.shape[1] == 0
            return proposed

    drafter = Ending

    def left(self) -> int:
        return 0 if getattr(self.draft, "full", False) else super().left()


@wrong("test_a_draft_may_propose_fewer_tokens_than_asked")
class CountsWhatItAskedFor(Loop):
    """The statistics take the draft to have proposed as many tokens as it was asked for."""

    def ask(self) -> int:
        self.asked = super().ask()
        return self.asked

    def count(self, drafted: int, accepted: int, emitted: int) -> Round:
        return Round(self.asked, accepted, emitted)


@wrong("test_a_draft_can_serve_one_sequence_after_another")
class DraftGoesOn(Loop):
    """A draft that has served does not read the start of the next prompt."""

    @classmethod
    def call(cls, target: Any, draft: Any, prompt: Tensor, new: int, **how: Any) -> Result:
        """Decode with a fresh loop, and a draft that may not be fresh."""
        held = getattr(draft, "cache", None)
        if held is None:
            return super().call(target, draft, prompt, new, **how)
        start, held_tokens = draft.start, min(held.length, prompt.shape[1] - 1)

        def goes_on(*ask: Any) -> None:
            start(*ask)
            nothing = torch.zeros(1, held.kv_heads, held_tokens, held.head_dim, dtype=held.dtype)
            for layer in range(held.layers):
                draft.cache.append(layer, nothing, nothing)
            draft.cache.commit(held_tokens)

        draft.start = goes_on
        try:
            return super().call(target, draft, prompt, new, **how)
        finally:
            draft.start = start


@wrong("test_refuses_what_no_draft_may_propose")
class BentIntoShape(Loop):
    """What a draft may not propose is bent into what it may."""

    def agree(self, guesses: list[int], chosen: list[int]) -> int:
        return super().agree(guesses[: len(chosen)], chosen)

    @classmethod
    def call(cls, target: Any, draft: Any, *args: Any, **how: Any) -> Result:
        """Decode with proposals that are brought into the vocabulary."""
        propose, known = draft.propose, target.config.vocab_size
        draft.propose = lambda committed, k: propose(committed, k).clamp(0, known - 1)[:, :k]
        return super().call(target, draft, *args, **how)


@wrong("test_fills_the_context_to_its_end")
class StopsAnEighthShort(Loop):
    """No round begins where not all of its proposals have room, and the rest is not generated."""

    def left(self) -> int:
        room = self.target.config.max_length - self.tokens.shape[1]
        return super().left() if room >= self.gamma else 0


@mutant(unguarded(speculative), "test_speculative::test_refuses_bad_arguments_by_name")
def nothing_is_refused(target: Any, draft: Any, prompt: Any, max_new_tokens: Any, **how: Any) -> Any:
    """Whatever comes gives the prompt."""
    return prompt
