"""Wrong laws of the next token, each the right one but for one fault."""

import math
from typing import Any

import torch
from torch import Tensor

from perf_lab.sampling import probabilities, sampling

from . import mutant


@mutant(sampling, killed_by="test_sampling::test_probabilities_are_the_softmax_of_the_kept_logits")
def unshifted(logits: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    """The logits are divided before the largest is subtracted."""
    return probabilities(logits / temperature, 1.0, top_k)


@mutant(sampling, killed_by="test_sampling::test_probabilities_are_the_softmax_of_the_kept_logits")
def not_renormalized(logits: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    """What top_k drops is missing from the sum."""
    return probabilities(logits, temperature) * (probabilities(logits, temperature, top_k) > 0)


@mutant(sampling, killed_by="test_sampling::test_top_k_keeps_exactly_k_and_of_equal_logits_the_lower_ids")
def all_ties_kept(logits: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    """All logits that equal the k-th largest are kept."""
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[..., -1:], -math.inf)
    return probabilities(logits, temperature)


@mutant(sampling, killed_by="test_sampling::test_top_k_keeps_exactly_k_and_of_equal_logits_the_lower_ids")
def higher_ids_kept(logits: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    """Of equal logits the higher ids are kept."""
    return probabilities(logits.flip(-1), temperature, top_k).flip(-1)


@mutant(sampling, killed_by="test_sampling::test_half_precision_logits_lose_nothing_more")
def rounded_to_the_logits(logits: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    """The division rounds to the dtype of the logits."""
    return probabilities(logits / temperature, 1.0, top_k)


ORDER = "test_sampling::test_every_step_has_its_say_in_its_order"
SURVIVES = "test_sampling::test_one_token_always_survives_the_best"


class Law:
    """The law in steps on logits, right; each subclass has one of them wrong."""

    steps = ("penalty", "heat", "top_k", "top_p", "min_p")

    @classmethod
    def call(
        cls,
        logits: Tensor,
        temperature: float,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Take every step whose argument is given, in the order of `steps`."""
        given = {"penalty": repetition_penalty, "heat": temperature, "top_k": top_k, "top_p": top_p}
        x = logits.double()  # so that the division makes no ties
        for step in cls.steps:
            value = {**given, "min_p": min_p}[step]
            if value is not None:
                x = getattr(cls, step)(x, value, *([seen] if step == "penalty" else []))
        return cls.normalized(x).to(logits.dtype)

    @staticmethod
    def normalized(x: Tensor) -> Tensor:
        return x.softmax(-1)

    @staticmethod
    def penalty(x: Tensor, penalty: float, seen: Tensor) -> Tensor:
        return torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)

    @staticmethod
    def heat(x: Tensor, temperature: float) -> Tensor:
        return (x - x.amax(-1, keepdim=True)) / temperature

    @classmethod
    def top_k(cls, x: Tensor, k: int) -> Tensor:
        return cls.without(x, lambda p: torch.arange(p.shape[-1]).expand(p.shape) >= k)

    @classmethod
    def top_p(cls, x: Tensor, share: float) -> Tensor:
        return cls.without(x, lambda p: cls.past(p, share)) if share < 1 else x

    @staticmethod
    def past(p: Tensor, share: float) -> Tensor:
        """Which of the falling probabilities are dropped."""
        past = torch.nn.functional.pad(p.cumsum(-1)[..., :-1], (1, 0)) >= share
        past[..., 0] = False
        return past

    @staticmethod
    def without(x: Tensor, past: Any) -> Tensor:
        order = x.argsort(dim=-1, descending=True, stable=True)
        dropped = past(x.softmax(-1).gather(-1, order))
        return x.masked_fill(torch.empty_like(dropped).scatter(-1, order, dropped), -math.inf)

    @staticmethod
    def min_p(x: Tensor, share: float) -> Tensor:
        p = x.softmax(-1)
        return x.masked_fill(p < share * p.amax(-1, keepdim=True), -math.inf)


def wrong(killed_by: str) -> Any:
    """Declare a faulty law a mutant."""

    def add(cls: type[Law]) -> type[Law]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            return cls.call(*args, **kwargs)

        call.__name__, call.__doc__ = cls.__name__, cls.__doc__
        mutant(sampling, killed_by)(call)
        return cls

    return add


@wrong("test_sampling::test_a_penalty_above_one_makes_seen_tokens_rarer_whatever_their_sign")
class PenaltyDividesAll(Law):
    """A seen token's logit is divided, whatever its sign: below 0 it becomes likelier."""

    @staticmethod
    def penalty(x: Tensor, penalty: float, seen: Tensor) -> Tensor:
        return torch.where(seen, x / penalty, x)


@wrong("test_sampling::test_a_penalty_above_one_makes_seen_tokens_rarer_whatever_their_sign")
class PenalizesTheUnseen(Law):
    """The penalty falls on what was not seen."""

    @staticmethod
    def penalty(x: Tensor, penalty: float, seen: Tensor) -> Tensor:
        return Law.penalty(x, penalty, ~seen)


@wrong("test_sampling::test_the_law_is_that_of_transformers")
class PenaltyIgnored(Law):
    """Repetition costs nothing."""

    steps = ("heat", "top_k", "top_p", "min_p")


@wrong(ORDER)
class TokenOfTheBoundaryDropped(Law):
    """The token with which the mass reaches top_p is dropped."""

    @staticmethod
    def past(p: Tensor, share: float) -> Tensor:
        past = p.cumsum(-1) > share
        past[..., 0] = False
        return past


@wrong("test_sampling::test_top_p_stops_where_its_mass_is_reached_exactly")
class OneTokenPastTheBoundary(Law):
    """The first token past the reached mass stays."""

    @staticmethod
    def past(p: Tensor, share: float) -> Tensor:
        past = torch.nn.functional.pad(p.cumsum(-1)[..., :-1], (1, 0)) > share
        past[..., 0] = False
        return past


@wrong("test_sampling::test_top_p_stops_where_its_mass_is_reached_exactly")
class TopPKeepsHigherIds(Law):
    """Of equal logits at the boundary of top_p the higher ids are kept."""

    @classmethod
    def top_p(cls, x: Tensor, share: float) -> Tensor:
        return super().top_p(x.flip(-1), share).flip(-1)


@wrong(SURVIVES)
class NothingSurvives(Law):
    """A top_p below the largest probability drops every token."""

    @staticmethod
    def past(p: Tensor, share: float) -> Tensor:
        return p.cumsum(-1) > share


@wrong(ORDER)
class TopPBeforeTopK(Law):
    """top_p is measured on the mass of all tokens."""

    steps = ("penalty", "heat", "top_p", "top_k", "min_p")


@wrong(ORDER)
class TopPBeforeTheTemperature(Law):
    """top_p is measured at temperature 1."""

    steps = ("penalty", "top_k", "top_p", "heat", "min_p")


@wrong("test_sampling::test_the_law_is_that_of_transformers")
class MinPBeforeTheTemperature(Law):
    """min_p is measured at temperature 1."""

    steps = ("penalty", "min_p", "heat", "top_k", "top_p")


@wrong("test_sampling::test_min_p_is_measured_against_the_largest")
class MinPIsAbsolute(Law):
    """min_p is a probability, not a share of the largest."""

    @staticmethod
    def min_p(x: Tensor, share: float) -> Tensor:
        p = x.softmax(-1)
        return x.masked_fill((p < share) & (p < p.amax(-1, keepdim=True)), -math.inf)


@wrong(SURVIVES)
class MinPDropsWhatEqualsIt(Law):
    """A token at exactly min_p times the largest is dropped: for 1 all of them."""

    @staticmethod
    def min_p(x: Tensor, share: float) -> Tensor:
        p = x.softmax(-1)
        return x.masked_fill(p <= share * p.amax(-1, keepdim=True), -math.inf)


@wrong(ORDER)
class NotNormalizedAgain(Law):
    """What top_p and min_p drop is missing from the sum."""

    @classmethod
    def top_p(cls, x: Tensor, share: float) -> Tensor:
        kept = super().top_p(x, share)
        return torch.where(kept == -math.inf, -math.inf, x.log_softmax(-1))

    @staticmethod
    def normalized(x: Tensor) -> Tensor:
        return x.exp() if bool((x.logsumexp(-1) < 0).all()) else x.softmax(-1)
