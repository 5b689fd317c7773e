"""Wrong laws of the next token, each the right one but for one fault."""

import math

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
