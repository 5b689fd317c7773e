"""Which gamma to speculate with, and whether to do it at all: the cost model turned round.

    costs = Costs(step=..., draft=..., verify={2: ..., 4: ..., 8: ...})      seconds, measured
    plan(result.agreement, costs)  ->  Plan(gamma=4, speedup=1.61, ...)     gamma 0: it does not pay

The agreement comes from a run (`Result.agreement`) or from a guess; the costs from `measured_costs`, or from
any other clock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perf_lab.op import Op
from perf_lab.speculative.cost_model import break_even, predicted_speedup

planner: Op = Op("planner", reference="cost_model")


@dataclass(frozen=True)
class Costs:
    """Seconds of one step of the target, one of the draft, and of a target forward over gamma + 1 tokens, by
    gamma. Raises ValueError for what is not positive (the draft may cost nothing), and without any gamma.
    """

    step: float
    draft: float
    verify: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.step > 0:
            raise ValueError(f"step: got {self.step}, accepted are seconds above 0")
        if not self.draft >= 0:
            raise ValueError(f"draft: got {self.draft}, accepted are seconds from 0 on")
        if not self.verify or not all(g >= 1 and s > 0 for g, s in self.verify.items()):
            raise ValueError(
                f"verify: got {dict(self.verify)}, accepted are seconds above 0 for each gamma from 1"
            )

    def speedup(self, agreement: float, gamma: int) -> float:
        """The predicted one; gamma is one of `verify`."""
        return predicted_speedup(agreement, gamma, self.draft / self.step, self.verify[gamma] / self.step)


@dataclass(frozen=True)
class Plan:
    """gamma, 0 where speculation does not pay; the predicted speed-up (1 then); and from which agreement on
    it would pay with the gamma that needs least, None where no draft is cheap enough.
    """

    gamma: int
    speedup: float
    agreement: float
    pays_from: float | None

    @property
    def pays(self) -> bool:
        """Whether to speculate."""
        return self.gamma > 0

    def __str__(self) -> str:
        if self.pays:
            return f"gamma {self.gamma}: {self.speedup:.2f}x predicted at agreement {self.agreement:.2f}"
        if self.pays_from is None:
            return "speculation does not pay: its rounds cost more than a draft always right could give"
        return (
            f"speculation does not pay at agreement {self.agreement:.2f}: "
            f"with these costs it would from {self.pays_from:.2f} on"
        )


@planner.register("cost_model")
def plan(agreement: float, costs: Costs, worth: float = 1.0) -> Plan:
    """The gamma of the largest predicted speed-up, the least of equal ones; 0 unless it is above `worth`.

    Raises ValueError unless the agreement is from 0 to 1.
    """
    if not 0 <= agreement <= 1:
        raise ValueError(f"agreement: got {agreement}, accepted are 0 to 1")
    best = max(sorted(costs.verify), key=lambda gamma: costs.speedup(agreement, gamma))
    speedup = costs.speedup(agreement, best)
    ends = [break_even(g, costs.draft / costs.step, v / costs.step) for g, v in costs.verify.items()]
    pays_from = min((end for end in ends if end is not None), default=None)
    return (
        Plan(best, speedup, agreement, pays_from) if speedup > worth else Plan(0, 1.0, agreement, pays_from)
    )


@torch.no_grad()
def measured_costs(
    target: Any,
    draft: Any,
    prompt: Tensor,
    gammas: Sequence[int] = (1, 2, 4, 8),
    clock: Callable[[Callable[[], Any], str], float] | None = None,
) -> Costs:
    """The costs of these two models behind this prompt [1, T], by `clock(work, device)`: seconds of one call,
    by default the least of five by the host's clock, the device waited for. draft=None: one that costs
    nothing.
    """
    timed = clock or least_of_five
    verify = {gamma: timed(forward(target, prompt, gamma + 1), prompt.device.type) for gamma in gammas}
    step = timed(forward(target, prompt, 1), prompt.device.type)
    own = 0.0 if draft is None else timed(forward(draft, prompt, 1), prompt.device.type)
    return Costs(step, own, verify)


def forward(model: Any, prompt: Tensor, width: int) -> Callable[[], Tensor]:
    """The work of one forward over `width` tokens behind the prompt and its choice, to be repeated."""
    ids = prompt.clamp(max=model.config.vocab_size - 1)
    cache = model.new_cache(1, ids.shape[1] + width)
    new = ids[:, -1:].expand(1, width)
    model(ids, cache, last_only=True)

    def work() -> Tensor:
        with torch.no_grad():
            cache.truncate(ids.shape[1])
            chosen: Tensor = model(new, cache).argmax(-1)
            return chosen

    return work


def least_of_five(work: Callable[[], Any], device: str) -> float:
    """Seconds of one call; the first one warms up."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        elif device == "mps":
            torch.mps.synchronize()
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(5))
