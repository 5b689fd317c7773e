"""What the cost model and the planner must never get wrong."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perf_lab.model import ModelConfig, Transformer
from perf_lab.pytest_plugin import implementations, on_devices
from perf_lab.speculative import Costs, break_even, measured_costs, plan, planner, predicted_speedup

gammas = st.integers(1, 12)
shares = st.floats(0, 1)
ratios = st.floats(0, 2)
costs = st.builds(
    Costs,
    st.floats(1e-4, 1),
    st.floats(0, 1),
    st.dictionaries(gammas, st.floats(1e-4, 2), min_size=1, max_size=4),
)


@given(agreement=shares, gamma=gammas, cost=ratios, verify=st.floats(1, 3))
def test_a_dearer_verification_is_a_smaller_speedup(agreement, gamma, cost, verify):
    plain = predicted_speedup(agreement, gamma, cost)
    got = predicted_speedup(agreement, gamma, cost, verify)
    # both over one numerator: the ratio is that of the rounds' costs, three roundings
    assert math.isclose(got / plain, (gamma * cost + 1) / (gamma * cost + verify), rel_tol=2**-50)


@given(gamma=gammas, cost=ratios, verify=st.floats(0.5, 4))
def test_at_the_break_even_the_speedup_is_one(gamma, cost, verify):
    end = break_even(gamma, cost, verify)
    if end is None:
        assert predicted_speedup(1.0, gamma, cost, verify) < 1
    elif end > 1e-15:
        # the slope is below (gamma + 1)^2 / verify, and the end is known within 2^-53
        assert math.isclose(predicted_speedup(end, gamma, cost, verify), 1, abs_tol=400 * 2**-50)
    else:
        assert predicted_speedup(0.0, gamma, cost, verify) >= 1


@implementations(planner)
@given(agreement=shares, costs=costs)
def test_no_other_gamma_is_predicted_to_be_faster(device, impl, agreement, costs):
    got = impl(agreement, costs)
    best = max(costs.speedup(agreement, gamma) for gamma in costs.verify)
    if best > 1:
        assert got.pays and costs.speedup(agreement, got.gamma) == best == got.speedup
    else:
        assert not got.pays and got.gamma == 0 and got.speedup == 1


@implementations(planner)
@given(agreement=shares, costs=costs)
def test_it_says_from_which_agreement_on_it_pays(device, impl, agreement, costs):
    got = impl(agreement, costs)
    if got.pays_from is None:
        assert not impl(1.0, costs).pays
    else:
        above, below = min(1.0, got.pays_from + 1e-9), got.pays_from - 1e-9
        assert impl(above, costs).pays or max(costs.speedup(above, g) for g in costs.verify) >= 1 - 1e-6
        assert below <= 0 or not impl(below, costs).pays
    assert ("does not pay" in str(got)) == (not got.pays)


@implementations(planner)
@given(agreement=shares, costs=costs, factor=st.sampled_from([2.0**-4, 2.0**5]))
def test_only_the_ratios_of_the_costs_matter(device, impl, agreement, costs, factor):
    scaled = Costs(
        costs.step * factor, costs.draft * factor, {g: s * factor for g, s in costs.verify.items()}
    )
    assert impl(agreement, scaled) == impl(agreement, costs)


@implementations(planner)
@given(costs=costs)
def test_a_draft_that_is_free_and_right_goes_as_far_as_it_can(device, impl, costs):
    free = dataclasses.replace(costs, draft=0.0, verify=dict.fromkeys(costs.verify, costs.step))
    assert impl(1.0, free).gamma == max(costs.verify)
    dear = dataclasses.replace(costs, draft=costs.step, verify=dict.fromkeys(costs.verify, costs.step))
    assert not impl(1.0, dear).pays  # as dear as the target: nothing is won
    assert not impl(0.0, free).pays  # never right: nothing is won


@on_devices()
def test_costs_are_measured_behind_the_prompt(device):
    config = ModelConfig(vocab_size=7, layers=2, width=16, heads=2, max_length=32)
    target = Transformer.seeded(config, 0, device=device)
    prompt, seen = torch.tensor([[1, 2, 3, 4]], device=device), []

    def clock(work, where):
        seen.append((tuple(work().shape), tuple(work().shape), where))
        return float(len(seen))

    got = measured_costs(target, target.first_layers(1), prompt, (1, 3), clock)
    assert seen == [((1, n), (1, n), device) for n in (2, 4, 1, 1)]
    assert got == Costs(3.0, 4.0, {1: 1.0, 3: 2.0})
    assert measured_costs(target, None, prompt, (2,)).draft == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs(0.0, 1.0, {1: 1.0}), "step: got 0.0, accepted are seconds above 0"),
        (lambda: Costs(1.0, -1.0, {1: 1.0}), "draft: got -1.0, accepted are seconds from 0 on"),
        (lambda: Costs(1.0, 1.0, {}), "verify: got {}, accepted are seconds"),
        (lambda: Costs(1.0, 1.0, {0: 1.0}), "verify: got {0: 1.0}, accepted are"),
        (lambda: plan(1.5, Costs(1.0, 1.0, {1: 1.0})), "agreement: got 1.5, accepted are 0 to 1"),
    ],
)
def test_refuses_bad_arguments_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
