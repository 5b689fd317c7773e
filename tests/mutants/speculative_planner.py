"""Wrong plans, each right but for one fault."""

import dataclasses
from typing import Any

from perf_lab.speculative import Costs, Plan, plan, planner

from . import mutant

BEST = "test_speculative_planner::test_no_other_gamma_is_predicted_to_be_faster"
FREE = "test_speculative_planner::test_a_draft_that_is_free_and_right_goes_as_far_as_it_can"


@mutant(planner, killed_by=BEST)
def verification_is_free(agreement: float, costs: Costs) -> Plan:
    """A forward over many tokens is taken to cost what one over a single token does."""
    return plan(agreement, dataclasses.replace(costs, verify=dict.fromkeys(costs.verify, costs.step)))


@mutant(planner, killed_by=BEST)
def most_tokens_a_forward(agreement: float, costs: Costs) -> Plan:
    """The gamma of the most tokens a round, whatever they cost."""
    gamma = max(costs.verify)
    return dataclasses.replace(plan(agreement, costs), gamma=gamma, speedup=costs.speedup(agreement, gamma))


@mutant(planner, killed_by=BEST)
def always_speculates(agreement: float, costs: Costs) -> Plan:
    """The best gamma is used even where it is slower than none."""
    return plan(agreement, costs, worth=0.0)


@mutant(planner, killed_by="test_speculative_planner::test_it_says_from_which_agreement_on_it_pays")
def pays_from_the_dearest(agreement: float, costs: Costs) -> Plan:
    """The agreement that is named is the one that the largest gamma needs."""
    largest = max(costs.verify)
    alone = plan(agreement, dataclasses.replace(costs, verify={largest: costs.verify[largest]}))
    return dataclasses.replace(plan(agreement, costs), pays_from=alone.pays_from)


@mutant(planner, killed_by="test_speculative_planner::test_only_the_ratios_of_the_costs_matter")
def seconds_for_ratios(agreement: float, costs: Costs) -> Plan:
    """Seconds are put where the model asks for ratios."""
    return plan(agreement, dataclasses.replace(costs, step=1.0))


@mutant(planner, killed_by=FREE)
def draft_is_free(agreement: float, costs: Any) -> Plan:
    """What the draft costs is left out."""
    return plan(agreement, dataclasses.replace(costs, draft=0.0))
