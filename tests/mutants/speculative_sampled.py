"""Wrong sampled speculation: the rule with one fault each, and drafts that misreport their laws."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from perf_lab.sampling import Sampling, pick
from perf_lab.speculative import GREEDY, Proposal, Result, acceptance, speculative
from perf_lab.speculative.draft_verify import draft_verify
from perf_lab.speculative.model_draft import ModelDraft

from . import mutant

ROUND = "test_speculative_sampled::test_a_round_gives_exactly_the_law_of_the_target"
WHOLE = "test_speculative_sampled::test_what_comes_out_has_exactly_the_law_of_the_target"
ROUNDED = "test_speculative_sampled::test_where_the_residual_rounds_to_nothing_the_law_stands"


class Rule:
    """Modified rejection sampling one row at a time, right; each subclass has one fault."""

    @classmethod
    def call(
        cls, p: Tensor, proposed: Tensor, uniform: Tensor, q: Tensor | None = None, counts: Any = None
    ) -> tuple[Tensor, Tensor]:
        """All rows at once, place by place."""
        rule, (batch, k), vocab = cls(), proposed.shape, p.shape[-1]
        if q is None:
            q = rule.certain(p, proposed, vocab)
        q = torch.nn.functional.pad(q, (0, vocab - q.shape[-1], 0, 1))  # [B, k + 1, V]
        most = torch.full((batch,), k) if counts is None else rule.limit(counts, k)
        row, going, accepted = (
            torch.arange(batch),
            torch.ones(batch, dtype=torch.bool),
            torch.zeros(batch).long(),
        )
        for i in range(k):
            x = proposed[:, i]
            going &= rule.keeps(uniform[:, i], p[row, i, x], q[row, i, x]) & (i < most)
            accepted += rule.counts_on(going, uniform[:, i], p[row, i, x], q[row, i, x])
        place = rule.place(accepted, k)
        law = rule.behind(p[row, place], q[row, place], accepted < most)
        drawn = pick(law, rule.number(uniform, accepted)[:, None])
        tokens = torch.nn.functional.pad(proposed, (0, 1))
        return tokens.scatter(1, accepted[:, None], drawn[:, None]), accepted

    def certain(self, p: Tensor, proposed: Tensor, vocab: int) -> Tensor:
        return torch.nn.functional.one_hot(proposed, vocab).to(p)

    def limit(self, counts: Tensor, k: int) -> Tensor:
        return counts

    def keeps(self, u: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return u * q < p

    def counts_on(self, going: Tensor, u: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return going.long()

    def place(self, accepted: Tensor, k: int) -> Tensor:
        return accepted

    def behind(self, p: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
        rest = (p - q).clamp(min=0)
        enough = rest.sum(-1) > torch.finfo(p.dtype).eps ** 2
        return torch.where((rejected & enough)[:, None], rest, p)

    def number(self, uniform: Tensor, accepted: Tensor) -> Tensor:
        return uniform[:, -1]


def wrong(killed_by: str) -> Callable[[type[Rule]], type[Rule]]:
    """Declare a faulty rule a mutant."""

    def add(rule: type[Rule]) -> type[Rule]:
        def call(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return rule.call(*args, **kwargs)

        call.__name__, call.__doc__ = rule.__name__, rule.__doc__
        mutant(acceptance, killed_by)(call)
        return rule

    return add


@wrong(ROUND)
class KeepsAll(Rule):
    """Every proposal is kept."""

    def keeps(self, u: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return p > 0


@wrong(ROUND)
class KeepsByTheTargetAlone(Rule):
    """A proposal is kept with the chance that the target gives it, whatever the draft gave."""

    def keeps(self, u: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return u < p


@wrong(ROUND)
class RatioUpsideDown(Rule):
    """A proposal is kept with chance q / p."""

    def keeps(self, u: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return (u * p < q) & (p > 0)


@wrong(ROUND)
class Typical(Rule):
    """A proposal is kept when the target likes it better than the draft, without a number: lossy."""

    def keeps(self, u: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return p >= q


@wrong(ROUND)
class DrawnFromTheTarget(Rule):
    """Behind a rejection the token is drawn from the target's law itself, not from the residual."""

    def behind(self, p: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
        return p


@wrong(ROUND)
class ResidualOfBothSigns(Rule):
    """The residual is |p - q|."""

    def behind(self, p: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
        rest = (p - q).abs()
        enough = rest.sum(-1) > torch.finfo(p.dtype).eps ** 2
        return torch.where((rejected & enough)[:, None], rest, p)


@wrong(ROUND)
class ResidualBehindAllKept(Rule):
    """Behind proposals that were all kept, what a longer round would have proposed is taken off as well."""

    def behind(self, p: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
        return super().behind(p, q, torch.ones_like(rejected))


@wrong(ROUND)
class OnePlaceBehind(Rule):
    """The token behind is drawn by the law of the place after it."""

    def place(self, accepted: Tensor, k: int) -> Tensor:
        return (accepted + 1).clamp(max=k)


@wrong(ROUND)
class GoesOnBehindARejection(Rule):
    """Proposals behind a rejected one are kept if they pass their own test."""

    def counts_on(self, going: Tensor, u: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return self.keeps(u, p, q).long()


@wrong(ROUND)
class OneNumberForTestAndDraw(Rule):
    """The number that rejected a proposal draws the token in its place: they depend on each other."""

    def number(self, uniform: Tensor, accepted: Tensor) -> Tensor:
        return uniform.gather(1, accepted[:, None]).squeeze(1)


@wrong(ROUND)
class SoftLawOfACertainDraft(Rule):
    """A draft that was certain is taken to have drawn from a soft law."""

    def certain(self, p: Tensor, proposed: Tensor, vocab: int) -> Tensor:
        return 0.6 * super().certain(p, proposed, vocab) + 0.4 / vocab


@wrong(ROUND)
class CountsIgnored(Rule):
    """What a row did not propose is tested too."""

    def limit(self, counts: Tensor, k: int) -> Tensor:
        return torch.full_like(counts, k)


@wrong(ROUNDED)
class NothingIsDrawnFrom(Rule):
    """A residual of nothing is drawn from all the same: the last id comes, whatever its probability."""

    def behind(self, p: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
        return torch.where(rejected[:, None], (p - q).clamp(min=0), p)


def with_draft(change: Callable[[ModelDraft, Any], Any]) -> Callable[..., Result]:
    """Speculate with a draft whose proposal goes through `change`."""
    right = ModelDraft.propose

    def run(*args: Any, **kwargs: Any) -> Result:
        def propose(self: ModelDraft, *ask: Any) -> Any:
            return change(self, right(self, *ask))

        with mock.patch.object(ModelDraft, "propose", propose):
            return draft_verify(*args, **kwargs)

    return run


@mutant(speculative, killed_by=WHOLE)
def greedy_draft_with_a_soft_law(*args: Any, **kwargs: Any) -> Result:
    """The draft proposes its best token and says that it drew it."""

    def change(draft: ModelDraft, proposal: Any) -> Any:
        if isinstance(proposal, Proposal):
            return Proposal(proposal.law.argmax(-1), proposal.law)
        return proposal

    return with_draft(change)(*args, **kwargs)


@mutant(speculative, killed_by=WHOLE)
def law_of_another_temperature(*args: Any, **kwargs: Any) -> Result:
    """The draft's law is reported without its temperature."""

    def change(draft: ModelDraft, proposal: Any) -> Any:
        if not isinstance(proposal, Proposal):
            return proposal
        plain = proposal.law**draft.sampling.temperature
        return Proposal(proposal.tokens, plain / plain.sum(-1, keepdim=True))

    return with_draft(change)(*args, **kwargs)


@mutant(speculative, killed_by=WHOLE)
def target_cut_to_the_drafts_vocabulary(target: Any, draft: Any, *args: Any, **kwargs: Any) -> Result:
    """Ids that the draft lacks are taken from the target too."""
    known = draft.model.config.vocab_size

    class Cut:
        config, new_cache = target.config, target.new_cache

        def __call__(self, tokens: Tensor, cache: Any = None, **how: Any) -> Tensor:
            logits = target(tokens, cache, **how).clone()
            if cache.length > 1:
                logits[..., known:] = -torch.inf
            return torch.where(logits.isneginf().all(-1, keepdim=True), 0.0, logits)

    return draft_verify(Cut(), draft, *args, **kwargs)


@mutant(speculative, killed_by=WHOLE)
def top_p_of_the_draft_alone(*args: Any, sampling: Sampling, **kwargs: Any) -> Result:
    """The target's own top_p is forgotten: the draft's is thought to do."""
    loose = Sampling(sampling.temperature, sampling.top_k, None, sampling.min_p)
    return draft_verify(*args, sampling=loose, **kwargs)


@mutant(speculative, killed_by=WHOLE)
def same_numbers_every_round(*args: Any, uniform: Tensor, **kwargs: Any) -> Result:
    """All rounds use the first one's numbers."""
    return draft_verify(*args, uniform=uniform[:1].expand_as(uniform), **kwargs)


@mutant(speculative, killed_by=WHOLE)
def tested_by_the_numbers_of_the_draft(*args: Any, uniform: Tensor, gamma: int, **kwargs: Any) -> Result:
    """The number that drew a proposal tests it as well."""
    shared = torch.cat((uniform[..., :gamma], uniform[..., :gamma], uniform[..., 2 * gamma :]), -1)
    return draft_verify(*args, uniform=shared, gamma=gamma, **kwargs)


@mutant(speculative, killed_by="test_speculative_sampled::test_the_same_seed_gives_the_same_tokens")
def generator_ignored(*args: Any, generator: Any = None, **kwargs: Any) -> Result:
    """The numbers come from the global generator."""
    return draft_verify(*args, **kwargs)


@mutant(
    speculative,
    killed_by="test_speculative_sampled::test_the_target_as_its_own_sampled_draft_is_always_accepted",
)
def draft_at_another_temperature(*args: Any, sampling: Sampling, **kwargs: Any) -> Result:
    """The draft draws at its own temperature, 1, whatever the target's: right in law, and often rejected."""
    target, draft, *rest = args
    return draft_verify(target, ModelDraft(draft, Sampling(1.0)), *rest, sampling=sampling, **kwargs)


@mutant(speculative, killed_by="test_speculative_sampled::test_a_temperature_near_zero_is_greedy")
def coldest_is_a_half(*args: Any, sampling: Sampling = GREEDY, **kwargs: Any) -> Result:
    """A temperature above 0 and below 1/2 is taken for 1/2, against overflow."""
    if 0 < sampling.temperature < 0.5:
        sampling = Sampling(0.5)
    return draft_verify(*args, sampling=sampling, **kwargs)
