"""Verdicts from samples: is the head slower than the base?

The unit is the median of one fresh process (a session): rounds inside a
process share its memory layout, its clocks and its neighbours, and are not
independent. All times are held as logarithms; a ratio is head over base, so
above 1 is slower.

A benchmark is slower or faster when both hold:
- the difference is sure: Mann-Whitney from six sessions a side, Welch on logs
  below that, Benjamini-Hochberg across the benchmarks of the suite, so that of
  a hundred suites in which nothing changed at most `Policy.alarms` move;
- the median ratio is past the effect floor: the largest of `Policy.floor`,
  the threshold of the benchmark, and what two sessions of one code differ by.
It is the same when the interval of its ratio lies inside the floor, and unclear
when neither can be said. One that only one side has is "no baseline".

Nothing here reads a file or a clock, and nothing is random.

Mann and Whitney 1947; Welch 1947; Benjamini and Hochberg 1995; the bootstrap
distribution of a median in closed form: Efron 1979, Hutson and Ernst 2000.
"""

import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
from scipy import stats

Times = Mapping[str, Sequence[float]]  # benchmark -> the median seconds of each session
Costs = Mapping[str, Mapping[str, Sequence[float]]]  # benchmark -> cost -> its value in each session

SLOWER, UNCLEAR, NO_BASELINE, FASTER, SAME = VERDICTS = ("slower", "unclear", "no baseline", "faster", "same")

RANKS_FROM = 6  # sessions a side
CONFIDENCE = 0.90  # of the interval: to lie inside the floor is then a test at 5% on each side
MEDIAN_EFFICIENCY = 0.37  # of the median absolute value as an estimate of a spread, normal noise
PAIRS_UPTO = 16  # sessions; above that the middle two of a resample are not told apart

# what a session states without noise, and whether less (1) or more (-1) of it is better
EXACT = {
    "peak_bytes": 1,
    "weight_bytes": 1,
    "cache_bytes": 1,
    "kernel_launches": 1,
    "flops": 1,
    "least_bytes": 1,
    "tokens_per_target_forward": -1,
}


@dataclass(frozen=True)
class Policy:
    """What counts: `alarms` is the share of unchanged suites that may move, `floor` the least change
    of interest, `thresholds` a larger floor for the benchmarks that a pattern names (fractions all).

    A pattern is a benchmark's full name, the name without its file, its function or its file, with *
    and ? as wildcards. Of several that fit, the longest counts.
    """

    alarms: float = 0.01
    floor: float = 0.03
    thresholds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.thresholds, Mapping):
            raise ValueError(f"thresholds: got {self.thresholds!r}, accepted is a table of fractions")
        for name, value in {"alarms": self.alarms, "floor": self.floor, **self.thresholds}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise ValueError(f"{name}: got {value!r}, accepted is a fraction between 0 and 1")

    def floor_of(self, benchmark: str) -> float:
        """The least change of this benchmark that is of interest."""
        fitting = [pattern for pattern in self.thresholds if fits(pattern, benchmark)]
        return max([self.floor, *(self.thresholds[pattern] for pattern in sorted(fitting, key=len)[-1:])])


DEFAULT = Policy()


def fits(pattern: str, benchmark: str) -> bool:
    """Whether a pattern names a benchmark such as "bench/test_x_speed.py::test_x_speed[cpu-eager-64]"."""
    file, _, name = benchmark.rpartition("::")
    forms = (benchmark, name, name.partition("[")[0], file)
    return any(fnmatchcase(form, pattern.replace("[", "[[]")) for form in forms)


@dataclass(frozen=True)
class Spread:
    """How much sessions of one code differ, in logs of their medians.

    typical: in half of the benchmarks, half of all pairs of sessions differ by less: a few sessions
    or benchmarks gone wrong do not move it. df: degrees of freedom that it is worth; 0: not known.
    """

    typical: float = 0.0
    df: float = 0.0

    @property
    def sd(self) -> float:
        """The standard deviation of one session that goes with it, for normal noise."""
        return self.typical / (float(stats.norm.isf(0.25)) * math.sqrt(2))


def spread(*sides: Times) -> Spread:
    """The spread between the sessions of each side."""
    samples = [np.log(times) for side in sides for times in side.values() if len(times) > 1]
    if not samples:
        return Spread()
    typical = np.median([np.median(_pairwise(sample)) for sample in samples])
    return Spread(float(typical), MEDIAN_EFFICIENCY * sum(len(sample) - 1 for sample in samples))


def _pairwise(sample: np.ndarray) -> np.ndarray:
    first, second = np.triu_indices(len(sample), k=1)
    return abs(sample[first] - sample[second])


def p_values(samples: Sequence[tuple[np.ndarray, np.ndarray]], resolve: float) -> np.ndarray:
    """Two-sided p-value of each (base, head): that both are draws of one distribution; 1 where a side
    has fewer than two sessions.

    resolve: the p-value that a clear difference must be able to reach. Where the ranks of so few
    sessions cannot, Welch judges there too.
    """
    found = np.ones(len(samples))
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, (base, head) in enumerate(samples):
        shapes.setdefault((len(base), len(head)), []).append(index)
    for (base_count, head_count), members in shapes.items():
        if min(base_count, head_count) < 2:
            continue
        base, head = (np.stack([samples[index][side] for index in members]) for side in (0, 1))
        ranks = min(base_count, head_count) >= RANKS_FROM and _least_p(base_count, head_count) <= resolve
        found[members] = _rank_p(base, head) if ranks else _welch_p(base, head)
    return found


def _least_p(base_count: int, head_count: int) -> float:
    """The p-value of a perfect separation."""
    return 2 / math.comb(base_count + head_count, head_count)


def _rank_p(base: np.ndarray, head: np.ndarray) -> np.ndarray:
    both = np.sort(np.concatenate([base, head], axis=1), axis=1)
    ties = (both[:, 1:] == both[:, :-1]).any(axis=1)
    p = np.ones(len(base))
    for rows, method in ((~ties, "exact"), (ties, "asymptotic")):
        if rows.any():
            p[rows] = stats.mannwhitneyu(head[rows], base[rows], axis=1, method=method).pvalue
    return np.nan_to_num(p, nan=1.0)  # all values the same


def _welch_p(base: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Welch's, but never surer than Student's: with few and unequal counts Welch alone is too sure
    (2 sessions against 8: seven times the errors it states at 1 in 1000).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # sessions that took exactly the same time
        p = [stats.ttest_ind(head, base, axis=1, equal_var=equal).pvalue for equal in (False, True)]
    return np.nan_to_num(np.maximum(*p), nan=1.0)  # no noise and no difference


@dataclass
class Timing:
    """One benchmark on both sides, as logs of each session's median seconds.

    p: adjusted over the suite. floor: as a log. overruled: why its time cannot be judged at all.
    """

    name: str
    base: np.ndarray
    head: np.ndarray
    p: float = 1.0
    alarms: float = Policy.alarms
    floor: float = 0.0
    spread: Spread = Spread()
    overruled: str = ""

    @property
    def shift(self) -> float:
        """The log of the median ratio, head over base; NaN without a baseline."""
        if not (len(self.base) and len(self.head)):
            return math.nan
        return float(np.median(self.head) - np.median(self.base))

    @functools.cached_property
    def interval(self) -> tuple[float, float] | None:
        """The interval of `shift` at CONFIDENCE, over sessions: from six a side by the bootstrap,
        below that from the spread of the whole suite; None when that is unknown.
        """
        if min(len(self.base), len(self.head)) >= RANKS_FROM:
            return bootstrap_interval(self.base, self.head)
        if not self.spread.df or not len(self.base) or not len(self.head):
            return None
        pooled = self.spread.sd * math.sqrt(_median_factor(self.base) + _median_factor(self.head))
        own = math.sqrt(_own_variance(self.base) + _own_variance(self.head))
        half = max(pooled, own) * float(stats.t.isf((1 - CONFIDENCE) / 2, self.spread.df))
        return self.shift - half, self.shift + half

    @property
    def moved(self) -> bool:
        """A sure difference, past the floor."""
        return self.p <= self.alarms and abs(self.shift) >= self.floor

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if not (len(self.base) and len(self.head)):
            return NO_BASELINE
        if self.overruled:
            return UNCLEAR
        if self.moved:
            return SLOWER if self.shift > 0 else FASTER
        inside = self.interval and -self.floor < self.interval[0] and self.interval[1] < self.floor
        return SAME if inside else UNCLEAR

    @property
    def note(self) -> str:
        """Why no more can be said, where that is so."""
        if self.verdict == NO_BASELINE:
            return "only in the head" if len(self.head) else "only in the base"
        if self.verdict != UNCLEAR:
            return ""
        if self.overruled:
            return self.overruled
        if not self.spread.df:
            return "one session a side: cannot be told from the noise between sessions"
        if min(len(self.base), len(self.head)) < 2:
            return "one session on a side: a change cannot be told from noise"
        if abs(self.shift) >= self.floor:
            return f"past the floor, but not sure (p {self.p:.2g})"
        return "within the floor, but not surely"


def _median_factor(sample: np.ndarray) -> float:
    """The variance of a sample's median, in variances of one value, for normal noise: exact up to
    two values, for 3 and 5 within 2%, for even counts somewhat too large.
    """
    n = len(sample)
    return 1 / n if n < 3 else math.pi / (2 * n + math.pi - 2)


def _own_variance(sample: np.ndarray) -> float:
    return float(sample.var(ddof=1)) * _median_factor(sample) if len(sample) > 1 else 0.0


def bootstrap_interval(base: np.ndarray, head: np.ndarray) -> tuple[float, float]:
    """The percentile interval, at CONFIDENCE, of median(head) - median(base) when the sessions of
    each side are drawn anew with replacement; of all such draws, not of some.
    """
    (base_medians, base_weights), (head_medians, head_weights) = _medians(base), _medians(head)
    shifts = np.subtract.outer(head_medians, base_medians).ravel()
    weights = np.multiply.outer(head_weights, base_weights).ravel()
    order = np.argsort(shifts)
    shifts, weights = shifts[order], weights[order]
    tail = (1 - CONFIDENCE) / 2 - 1e-9  # against rounding of the sums
    low = np.searchsorted(np.cumsum(weights), tail)
    high = np.searchsorted(np.cumsum(weights[::-1]), tail)
    return float(shifts[low]), float(shifts[::-1][high])


def _medians(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every median that a resample can have, and its probability."""
    lower, upper, weights = _middle_pairs(len(sample))
    ordered = np.sort(sample)
    return (ordered[lower] + ordered[upper]) / 2, weights


@functools.cache
def _middle_pairs(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ranks (i, j) of a resample's two middle values (i == j for odd n), with their probabilities.

    For even n = 2 r and i < j, r draws are at most x_i with one that is x_i, the others at least
    x_j with one that is x_j; what is left of P(the r-th is x_i) is i == j. With many values the
    middle two are neighbours: either stands for both then, half of the time.
    """
    rank = (n + 1) // 2
    single = np.diff(stats.binom.sf(rank - 1, n, np.arange(n + 1) / n))  # P(the rank-th is x_i)
    if n % 2 or n > PAIRS_UPTO:
        return np.arange(n), np.arange(n), (single + single[::-1]) / 2
    step = np.diff((np.arange(n + 1) / n) ** rank)  # (i/n)^r - ((i-1)/n)^r
    joint = np.triu(math.comb(n, rank) * np.multiply.outer(step, step[::-1]), k=1)
    joint[np.diag_indices(n)] = np.maximum(single - joint.sum(axis=1), 0.0)
    lower, upper = np.triu_indices(n)
    return lower, upper, joint[lower, upper]


def judge(
    base: Times,
    head: Times,
    policy: Policy = DEFAULT,
    between: Spread | None = None,
    family: int | None = None,
) -> list[Timing]:
    """Every benchmark of either side, judged, in the order of their names.

    between: the spread between sessions; by default that of these. family: how many benchmarks
    share the error rate; by default those that are on both sides here.
    """
    between = spread(base, head) if between is None else between
    names = sorted({*base, *head})
    found = [
        Timing(
            name,
            np.log(base.get(name, ())),
            np.log(head.get(name, ())),
            alarms=policy.alarms,
            floor=max(math.log1p(policy.floor_of(name)), between.typical),
            spread=between,
        )
        for name in names
    ]
    both = [timing for timing in found if len(timing.base) and len(timing.head)]
    family = max(family or 0, len(both))
    p = p_values([(timing.base, timing.head) for timing in both], policy.alarms / max(1, family))
    for timing, adjusted in zip(both, adjust(p, family), strict=True):
        timing.p = float(adjusted)
    return found


def adjust(p: np.ndarray, family: int) -> np.ndarray:
    """Benjamini and Hochberg's, in a family of that many tests, of which those not given show nothing."""
    return stats.false_discovery_control(np.append(p, np.ones(family - len(p))))[: len(p)]


@dataclass(frozen=True)
class CostChange:
    """One cost of one benchmark: the values that sessions of each side stated."""

    name: str
    cost: str
    base: tuple[float, ...]
    head: tuple[float, ...]

    @property
    def verdict(self) -> str:
        """Exact: "slower" reads "costs more". Unclear when sessions of one side do not agree."""
        if len(self.base) > 1 or len(self.head) > 1:
            return SAME if self.base == self.head else UNCLEAR
        more = (self.head[0] - self.base[0]) * EXACT[self.cost]
        return SLOWER if more > 0 else FASTER if more < 0 else SAME

    @property
    def note(self) -> str:
        """Why no more can be said, where that is so."""
        return "sessions of one side do not agree" if self.verdict == UNCLEAR else ""


def judge_costs(base: Costs, head: Costs) -> list[CostChange]:
    """Every exact cost that both sides state of a benchmark."""
    return [
        CostChange(name, cost, *(tuple(sorted(set(side[name][cost]))) for side in (base, head)))
        for name in sorted({*base} & {*head})
        for cost in sorted({*base[name]} & {*head[name]})
    ]


Judged = Timing | CostChange


def exit_code(judged: Iterable[Judged], *, new_ok: bool = False) -> int:
    """0: nothing is slower. 1: something is. 3: nothing is, but something has no baseline
    (0 with new_ok).
    """
    verdicts = {row.verdict for row in judged}
    if SLOWER in verdicts:
        return 1
    return 3 if NO_BASELINE in verdicts and not new_ok else 0
