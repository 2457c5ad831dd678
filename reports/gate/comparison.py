"""A comparison of two sides: its options, the result of each metric, and the verdict."""

import math
from dataclasses import dataclass

import numpy as np

from reports.gate.decide import Evidence, GateDecision, Levels
from reports.gate.noise_split import NoiseSplit
from reports.gate.requirements import RequirementResult
from reports.gate.side_run import FRACTIONS, GateRefusal
from reports.metrics.requests.per_request import Direction
from reports.stats.estimators import Interval

DEFAULT_GATED = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "error_rate")
DEFAULT_SHOWN = ("requests_per_s", "ttft_p95_ms", "tpot_p95_ms", "e2e_p50_ms", "e2e_p95_ms", "gap_p99_ms")
MIN_EFFECT = 0.03
LEVEL_95 = 0.025
"""One-sided level of each end of a 95 % interval."""
CLEAR_EFFECT = 1.5
"""With low noise, 80 % of comparisons find a regression of this multiple of the smallest effect of interest."""
MAX_LOG = 700.0
"""The largest logarithm of a change that is converted to a percentage; `exp` of more overflows."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Options of a comparison.

    min_effect: the smallest relative change of interest; `error_points`: that of a fraction, as a difference.
    pairs: a fixed number of pairs, tested in a single look.
    alpha: probability of a false regression over all gated metrics and looks; `pass_alpha`: level of a metric's bounds.
    inconclusive: the exit code of an inconclusive result: report (3), pass (0) or fail (1).
    allow: facts in which the runs may differ.
    equal_contention: adjusts changes to equal waiting for processors.
    """

    gated: tuple[str, ...] = DEFAULT_GATED
    shown: tuple[str, ...] = DEFAULT_SHOWN
    min_effect: float = MIN_EFFECT
    error_points: float = 0.005
    min_pairs: int = 4
    max_pairs: int = 12
    pairs: int | None = None
    alpha: float = 0.025
    pass_alpha: float = 0.05
    inconclusive: str = "report"
    allow: frozenset[str] = frozenset()
    require: tuple[str, ...] = ()
    equal_contention: bool = False

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of pairs at which the result is tested."""
        return (self.pairs,) if self.pairs else tuple(range(self.min_pairs, self.max_pairs + 1))

    @property
    def levels(self) -> Levels:
        return Levels(self.looks, self.alpha, self.pass_alpha)

    def claim_level(self, is_gated: bool) -> float:
        """The level of one look at a regression: for a gated metric at the first of Holm's steps, the strictest."""
        levels = self.levels
        return levels.rejection_level(len(self.gated)) if is_gated else levels.bounds_level

    def limit(self, metric: str) -> float:
        """The smallest effect of interest, in the unit of d; never below 3 %."""
        return self.error_points if metric in FRACTIONS else math.log1p(max(self.min_effect, MIN_EFFECT))


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric of a comparison. `a` and `b` are the medians of the sides; `d` has one value per pair.

    `mean`, with its bounds, is the mean of d at the look that decided; positive is worse. `smallest_effect` is in
    percent (for a fraction in percentage points): with as many pairs and this noise, a regression of this size is found
    in 80 % of comparisons. It is above the limit, because a regression of just the limit is found in half of them.
    """

    name: str
    direction: Direction
    is_gated: bool
    a: float | None
    b: float | None
    d: tuple[float, ...]
    mean: Interval
    decision: GateDecision
    limit: float
    smallest_effect: float

    @property
    def is_fraction(self) -> bool:
        return self.name in FRACTIONS

    @property
    def change(self) -> Interval:
        """The change of B against A, in percent of A or in percentage points; positive is a larger value."""
        return self._as_change(self.mean)

    @property
    def last_change(self) -> float:
        """The change in the last pair alone; NaN without one."""
        last = self.d[-1] if self.d else math.nan
        return self._as_change(Interval(last, last, last)).value

    @property
    def running_change(self) -> Interval:
        """The change over the pairs so far with its 95 % interval, for display: not corrected for several looks."""
        if not self.d:
            return Interval(math.nan, math.nan, math.nan)
        return self._as_change(Evidence.of_pairs(np.array(self.d)).bounds(LEVEL_95))

    def _as_change(self, mean: Interval) -> Interval:
        """An interval of d, in percent of A or in percentage points; positive is a larger value."""
        sign = -1.0 if self.direction is Direction.HIGHER else 1.0
        convert = (lambda x: 100 * x) if self.is_fraction else (lambda x: 100 * math.expm1(min(x, MAX_LOG)))
        lo, hi = sorted(convert(sign * end) for end in (mean.lo, mean.hi))
        return Interval(convert(sign * mean.value), lo, hi)

    @property
    def change_unit(self) -> str:
        return "points" if self.is_fraction else "%"

    @property
    def clear_limit(self) -> float:
        """A clear regression, `CLEAR_EFFECT` times the smallest effect of interest, in the unit of d."""
        return CLEAR_EFFECT * self.limit if self.is_fraction else math.log1p(CLEAR_EFFECT * math.expm1(self.limit))

    @property
    def is_noisy(self) -> bool:
        """Whether fewer than 80 % of comparisons with this noise and number of pairs find a clear regression."""
        clear = self.clear_limit if self.is_fraction else math.expm1(self.clear_limit)
        return self.smallest_effect > 100 * clear


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on B against A, with all its evidence.

    is_stored: the sides were not measured in pairs; `num_pairs` then counts the runs of B, and `runs_a` those of A.
    setting: the model, the load mode and the device, as far as the runs record them.
    slices: the number of slices of each side in a pair; 1 for separate runs.
    noise: the components of the gated metrics' noise, from the slices.
    """

    label_a: str
    label_b: str
    num_pairs: int
    options: CompareOptions
    metrics: tuple[MetricResult, ...]
    requirements: tuple[RequirementResult, ...] = ()
    refusals: tuple[GateRefusal, ...] = ()
    notes: tuple[str, ...] = ()
    runs_a: int = 0
    is_stored: bool = False
    setting: str = ""
    slices: int = 1
    noise: tuple[NoiseSplit, ...] = ()

    @property
    def size(self) -> str:
        """The sample size in words, such as `8 interleaved pairs of runs`."""
        if self.is_stored:
            return f"{self.num_pairs} runs of B against {self.runs_a} stored runs of A, not interleaved"
        if self.slices > 1:
            return f"{self.num_pairs} pairs of launches with {self.slices} interleaved slices a side"
        return f"{self.num_pairs} interleaved pairs of runs"

    @property
    def gated(self) -> tuple[MetricResult, ...]:
        return tuple(metric for metric in self.metrics if metric.is_gated)

    @property
    def verdict(self) -> GateDecision:
        """The worst of the gated decisions; improvement only if no metric is worse or inconclusive."""
        decisions = {metric.decision for metric in self.gated}
        if self.refusals or GateDecision.NOT_MEASURED in decisions or not decisions:
            return GateDecision.NOT_MEASURED
        order = (GateDecision.REGRESSION, GateDecision.INCONCLUSIVE, GateDecision.IMPROVEMENT, GateDecision.PASS)
        return next(decision for decision in order if decision in decisions)

    @property
    def is_decided(self) -> bool:
        """Whether every gated metric is decided, so that more pairs change nothing."""
        return bool(self.metrics) and all(metric.decision is not GateDecision.INCONCLUSIVE for metric in self.gated)

    @property
    def exit_code(self) -> int:
        """0 pass or improvement, 1 regression or requirement missed, 2 unlike runs, 3 inconclusive, 4 not measured."""
        if any(refusal.is_usage for refusal in self.refusals):
            return 2
        if self.verdict is GateDecision.NOT_MEASURED:
            return 4
        if self.verdict is GateDecision.REGRESSION or any(not result.is_met for result in self.requirements):
            return 1
        if self.verdict is GateDecision.INCONCLUSIVE:
            return {"report": 3, "pass": 0, "fail": 1}[self.options.inconclusive]
        return 0

    @property
    def worst(self) -> MetricResult | None:
        """The gated metric with the largest mean(d) relative to its limit."""
        return max(self.gated, key=lambda metric: metric.mean.value / metric.limit, default=None)
