"""Wrong gates: each is a mistake that a harness in use makes, or could.

The gate is no op of the laboratory. It is held in the same table here, so that
one property serves the gate and its mutants.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from perf_lab.measure.gate import (
    DEFAULT,
    RANKS_FROM,
    CostChange,
    Costs,
    Policy,
    Spread,
    Times,
    Timing,
    judge,
    judge_costs,
    p_values,
)
from perf_lab.measure.sides import Side
from perf_lab.op import Op

from . import mutant

gate = Op("gate")
gate.register("perf_lab", devices=("cpu",))(judge)

cost_gate = Op("cost_gate")
cost_gate.register("perf_lab", devices=("cpu",))(judge_costs)

sessions = Op("sessions")


@sessions.register("perf_lab", devices=("cpu",))
def times_of(files: Sequence[dict[str, Any]]) -> Times:
    """The times of one side, from what its files hold."""
    side = Side()
    for number, content in enumerate(files):
        side.add(number, content)
    return side.times


@mutant(gate, killed_by="test_gate::test_of_100_suites_without_a_change_at_most_1_alarms")
def uncorrected(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """Each benchmark has an error rate of its own: twenty have twenty."""
    found = judge(base, head, policy)
    return _with_p(found, p_values([(t.base, t.head) for t in found], policy.alarms))


@mutant(gate, killed_by="test_gate::test_of_100_suites_without_a_change_at_most_1_alarms")
def rounds_as_sessions(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """Values of one process are counted as if each had a process of its own."""
    return judge(*({name: np.repeat(times, 3) for name, times in s.items()} for s in (base, head)), policy)


@mutant(gate, killed_by="test_gate::test_of_100_suites_without_a_change_at_most_1_alarms")
def medians_alone(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """A change past the floor is one, sure or not: what min:5% does."""
    found = judge(base, head, policy)
    return _with_p(found, np.zeros(len(found)))


@mutant(gate, killed_by="test_gate::test_of_100_suites_without_a_change_at_most_1_alarms")
def welch_alone(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """Welch's test without Student's: too sure where one side has few sessions."""
    found = judge(base, head, policy)
    sides = (np.stack([getattr(t, side) for t in found]) for side in ("head", "base"))
    p = stats.ttest_ind(*sides, axis=1, equal_var=False).pvalue
    return _with_p(found, stats.false_discovery_control(p))


@mutant(gate, killed_by="test_gate::test_real_slowdowns_are_found_at_eight_sessions")
def never_sure(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """Nothing is ever sure."""
    return judge(base, head, dataclasses.replace(policy, alarms=1e-9))


@mutant(gate, killed_by="test_gate::test_what_takes_longer_is_slower")
def upside_down(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """The ratio is base over head."""
    return judge(head, base, policy)


@mutant(gate, killed_by="test_gate::test_a_change_below_the_floor_is_none")
def no_floor(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """Any sure difference counts, however small."""
    return _with_floor(judge(base, head, policy), 1e-9)


@mutant(gate, killed_by="test_gate::test_a_change_below_the_threshold_of_its_benchmark_is_none")
def no_thresholds(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """The thresholds of single benchmarks are not looked at."""
    return judge(base, head, dataclasses.replace(policy, thresholds={}))


@mutant(gate, killed_by="test_gate::test_a_change_below_what_sessions_of_one_code_differ_by_is_none")
def quiet_machine(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """The floor is three percent on every machine."""
    return judge(base, head, policy, between=Spread(0.0, 99))


@mutant(gate, killed_by="test_gate::test_swapping_the_sides_mirrors_the_verdict")
def lopsided_floor(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """Twice as much is asked of a slowdown as of a gain."""
    found = judge(base, head, policy)
    return [_with_floor([t], t.floor * 2)[0] if t.shift > 0 else t for t in found]


@mutant(gate, killed_by="test_gate::test_the_order_of_sessions_does_not_matter")
def paired_by_place(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """The first session of one side is held against the first of the other."""
    found = judge(base, head, policy)
    counts = [min(len(timing.base), len(timing.head)) for timing in found]
    p = [
        stats.ttest_rel(t.head[:n], t.base[:n]).pvalue if n > 1 and np.ptp(t.head[:n] - t.base[:n]) else 1.0
        for t, n in zip(found, counts, strict=True)
    ]
    return _with_p(found, np.array(p))


@mutant(gate, killed_by="test_gate::test_one_session_a_side_decides_nothing")
def one_is_enough(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """A single session a side is believed."""
    found = judge(base, head, policy)
    for timing in found:
        timing.p = 0.0 if len(timing.base) == len(timing.head) == 1 else timing.p
    return found


@mutant(gate, killed_by="test_gate::test_what_one_side_lacks_is_no_baseline")
def forgets_the_new(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """What has no baseline passes without a word."""
    return [timing for timing in judge(base, head, policy) if timing.name in base]


@mutant(gate, killed_by="test_gate::test_a_slowdown_is_not_called_the_same")
def same_until_proven(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """What is not shown to differ is the same."""

    class Sure(Timing):
        interval = (0.0, 0.0)

    return [
        Sure(**{f.name: getattr(t, f.name) for f in dataclasses.fields(t)}) for t in judge(base, head, policy)
    ]


@mutant(gate, killed_by="test_gate::test_more_sessions_do_not_make_it_less_sure")
def ranks_at_any_price(base: Times, head: Times, policy: Policy = DEFAULT) -> list[Timing]:
    """Mann-Whitney from six sessions, though six cannot reach the p-value that twenty benchmarks ask for."""
    found = judge(base, head, policy)
    if min(len(timing.head) for timing in found) < RANKS_FROM:
        return found
    sides = (np.stack([getattr(t, side) for t in found]) for side in ("head", "base"))
    p = stats.mannwhitneyu(*sides, axis=1, method="exact").pvalue
    return _with_p(found, stats.false_discovery_control(p))


def _with_p(timings: list[Timing], p: np.ndarray) -> list[Timing]:
    for timing, value in zip(timings, p, strict=True):
        timing.p = float(value)
    return timings


def _with_floor(timings: list[Timing], floor: float) -> list[Timing]:
    for timing in timings:
        timing.floor = floor
    return timings


@mutant(sessions, killed_by="test_gate::test_rounds_of_a_session_count_once")
def rounds_pooled(files: Sequence[dict[str, Any]]) -> Times:
    """Every round is a value of its own."""
    found: dict[str, list[float]] = {}
    for content in files:
        for benchmark in content["benchmarks"]:
            found.setdefault(benchmark["fullname"], []).extend(benchmark["stats"]["data"])
    return found


@mutant(cost_gate, killed_by="test_gate::test_a_cost_counts_to_the_last_byte")
def costs_with_a_tolerance(base: Costs, head: Costs) -> list[CostChange]:
    """Three percent more memory are none."""
    near = [
        (name, cost)
        for name in base
        for cost in base[name]
        if abs(math.log(head[name][cost][0] / base[name][cost][0])) < 0.03
    ]
    return [
        dataclasses.replace(change, head=change.base) if (change.name, change.cost) in near else change
        for change in judge_costs(base, head)
    ]


@mutant(cost_gate, killed_by="test_gate::test_more_tokens_for_each_forward_pass_are_a_gain")
def more_is_always_worse(base: Costs, head: Costs) -> list[CostChange]:
    """More tokens for each forward pass are taken for a loss."""
    return judge_costs(head, base)


@mutant(cost_gate, killed_by="test_gate::test_a_cost_that_sessions_of_a_side_disagree_on_is_unclear")
def first_session_only(base: Costs, head: Costs) -> list[CostChange]:
    """The first session speaks for all."""
    first = [
        {name: {cost: values[:1] for cost, values in costs.items()} for name, costs in side.items()}
        for side in (base, head)
    ]
    return judge_costs(*first)
