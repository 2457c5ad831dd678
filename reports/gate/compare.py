"""The gate: decides from pairs of runs whether B is worse than A.

The unit is the pair. Its statistic is d = ln(B / A), with the sign chosen so that positive is worse. For a fraction
(error rate) it is the difference B - A. A gated metric has regressed when the lower bound of mean(d) is above 0 and
mean(d) reaches the smallest effect of interest. It passes when the upper bound is below that effect. Otherwise it is
inconclusive.

Pairs are measured one after the other, and each pair from `min_pairs` on is a look. Pocock's rule corrects the bounds
for this: each look has the same nominal level, and all looks together have an error rate of `alpha` when nothing
changed. Over several gated metrics, regressions are claimed in Holm's order. The first decision on a metric stands. The
target is 5 % false alarms. Regressions are claimed at half of it, so that a few hundred comparisons also stay below the
target, and not only their expectation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from reports.gate.decide import Evidence, FirstDecision, GateDecision, Levels, decide, pass_decision
from reports.gate.noise_split import NoiseSplit, split_noise
from reports.gate.requirements import Requirement, RequirementResult
from reports.gate.side_run import (
    FRACTIONS,
    GateRefusal,
    Pair,
    SideRun,
    direction_of,
    find_refusals,
    log_degradation,
    median_of,
    setting_of,
)
from reports.metrics.per_request import Direction
from reports.stats.estimators import Interval
from reports.text import plain_text

Array = npt.NDArray[np.float64]

DEFAULT_GATED = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "error_rate")
DEFAULT_SHOWN = ("requests_per_s", "ttft_p95_ms", "tpot_p95_ms", "e2e_p50_ms", "e2e_p95_ms", "gap_p99_ms")
MIN_EFFECT = 0.03
# One-sided level of each end of an interval of 95 %; the largest logarithm of a change that is shown as a percentage.
RUNNING_LEVEL, MOST_LOG = 0.025, 700.0


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Options of a comparison. `pairs` fixes the number of pairs (a single look); `allow` names differences to ignore.

    `alpha`: false regressions over all gated metrics and looks; `pass_alpha`: level of one metric's bounds.
    `inconclusive` sets the exit code of an inconclusive result: report (3), pass (0) or fail (1). `equal_contention`
    adjusts changes to equal waiting for processors.
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

    def limit(self, metric: str) -> float:
        """The smallest effect of interest, in the unit of d; never below 3 %."""
        return self.error_points if metric in FRACTIONS else math.log1p(max(self.min_effect, MIN_EFFECT))


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric of a comparison. `d` has one value per pair; mean and bounds are those at the deciding look.

    `mean` and its bounds are in the unit of d: positive is worse. `smallest_effect` is the change that these pairs
    detect with a power of 80 %, in percent (for fractions in percentage points).
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
        """The mean of the pairs so far with its 95 % interval, for display: no correction for looks, no adjustment."""
        if not self.d:
            return Interval(math.nan, math.nan, math.nan)
        return self._as_change(Evidence.of_pairs(np.array(self.d)).bounds(RUNNING_LEVEL))

    def _as_change(self, mean: Interval) -> Interval:
        """An interval of d, in percent of A or in percentage points; positive is a larger value."""
        turn = -1.0 if self.direction is Direction.HIGHER else 1.0
        convert = (lambda x: 100 * x) if self.is_fraction else (lambda x: 100 * math.expm1(min(x, MOST_LOG)))
        ends = sorted(convert(turn * end) for end in (mean.lo, mean.hi))
        return Interval(convert(turn * mean.value), ends[0], ends[1])

    @property
    def change_unit(self) -> str:
        return "points" if self.is_fraction else "%"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on B against A, with all its evidence.

    If the sides were not measured in pairs (`is_stored`), `num_pairs` counts the runs of B. `setting` names the model,
    the load mode and the device, as far as the runs record them. `slices`: of each side in a pair, 1 for separate runs;
    `noise`: the components of the gated metrics' noise, from the slices.
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
        """`8 interleaved pairs of runs`; for stored runs the number of each side."""
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


def judge(pairs: Sequence[Pair], options: CompareOptions | None = None) -> Comparison:
    """The verdict on the pairs so far, as a sequence of looks; refuses invalid and unlike runs.

    With fewer pairs than the first look every metric is inconclusive. Raises KeyError for an unknown metric.
    """
    options = options or CompareOptions()
    label_a, label_b = (plain_text(pairs[0].a.label), plain_text(pairs[0].b.label)) if pairs else ("A", "B")
    named = [(f"pair {number}, {side}", run) for number, pair in enumerate(pairs, 1) for side, run in _sides(pair)]
    refusals, notes = find_refusals(named, options.allow)
    setting = setting_of(pairs[0].a) if pairs else ""
    if refusals:
        return Comparison(label_a, label_b, len(pairs), options, (), (), refusals, notes, setting=setting)
    differences = {name: _differences(pairs, name) for name in (*options.gated, *options.shown)}

    contention = _contention(pairs) if options.equal_contention else None
    if options.equal_contention and pairs:
        notes += (contention_note(contention),)

    def evidence(name: str, look: int) -> Evidence | None:
        d = differences[name]
        if d is None or len(d) < look:
            return None
        if contention is None or name in FRACTIONS:
            return Evidence.of_pairs(d[:look])
        return Evidence.adjusted(d[:look], contention[:look])

    limits = {name: options.limit(name) for name in options.gated}
    decisions = decide(options.gated, evidence, limits, options.levels)
    metrics = []
    for name, d in differences.items():
        if d is None and name not in options.gated:
            continue
        look = decisions[name].look if name in decisions else 0 if d is None else len(d)
        sides = [median_of(run.values.get(name) for run in side) for side in zip(*map(_runs, pairs), strict=True)]
        metrics.append(
            metric_result(name, sides, d, evidence(name, look) if look else None, decisions.get(name), options)
        )
    requirements = judge_requirements([pair.b for pair in pairs], options)
    counts, judged = (len(pairs), options), (tuple(metrics), requirements)
    found = Comparison(label_a, label_b, *counts, *judged, (), notes, len(pairs), setting=setting)
    slices = min((len(pair.runs) for pair in pairs), default=1)
    return found if slices == 1 else replace(found, slices=slices, noise=split_noise(pairs, options.gated))


def judge_requirements(runs: Sequence[SideRun], options: CompareOptions) -> tuple[RequirementResult, ...]:
    """Each fixed limit, checked against the median of a side's runs."""
    return tuple(
        RequirementResult(found, median_of(run.values.get(found.metric) for run in runs))
        for found in map(Requirement.parse, options.require)
    )


def metrics_needed(options: CompareOptions) -> tuple[str, ...]:
    """Every metric that these options need in a `SideRun`."""
    required = [Requirement.parse(text).metric for text in options.require]
    return tuple(dict.fromkeys((*options.gated, *options.shown, *required)))


def _sides(pair: Pair) -> tuple[tuple[str, SideRun], ...]:
    return (("A", pair.a), ("B", pair.b))


def _runs(pair: Pair) -> tuple[SideRun, SideRun]:
    return (pair.a, pair.b)


def _differences(pairs: Sequence[Pair], name: str) -> Array | None:
    """d of each pair; None where a run lacks the metric or has no logarithm of it."""
    sides = [
        log_degradation([run.values.get(name) for run in side], name) for side in zip(*map(_runs, pairs), strict=True)
    ]
    if not sides:
        return np.array([])
    return None if sides[0] is None or sides[1] is None else sides[1] - sides[0]


def _contention(pairs: Sequence[Pair]) -> Array | None:
    """ln of B's contention over A's in each pair; None if a run has none."""
    ratios = [
        pair.b.contention / pair.a.contention for pair in pairs if pair.a.contention and pair.b.contention is not None
    ]
    return np.log(ratios) if len(ratios) == len(pairs) else None


def contention_note(contention: Array | None) -> str:
    """The adjustment in words, with the difference that it leaves out."""
    if contention is None:
        return (
            "changes are not adjusted to equal contention: the kernel does not report how long the threads of a server "
            "waited"
        )
    found = Evidence.of_pairs(contention)
    bounds = found.bounds(0.025)
    lo, mean, hi = (100 * math.expm1(min(each, 20.0)) for each in (bounds.lo, bounds.value, bounds.hi))
    text = (
        "changes are adjusted to equal contention, the time that the server's threads were ready to run over the time "
        f"that they ran; B's is {mean:+.1f} % against A's ({lo:+.1f} to {hi:+.1f})"
    )
    if bounds.lo <= 0 <= bounds.hi:
        return text
    return f"{text}. B itself may cause this difference, which the adjustment leaves out: compare without it as well"


def metric_result(
    name: str,
    sides: Sequence[float | None],
    d: Array | None,
    evidence: Evidence | None,
    decided: FirstDecision | None,
    options: CompareOptions,
) -> MetricResult:
    """The result of one metric: medians of both sides, evidence at the deciding look, and the decision."""
    is_gated, limit = name in options.gated, options.limit(name)
    mean, least = Interval(math.nan, math.nan, math.nan), math.nan
    decision = GateDecision.NOT_MEASURED if d is None else GateDecision.INCONCLUSIVE
    if evidence is not None:
        level = options.levels.bounds_level
        mean = evidence.bounds(level)
        least = max(evidence.detectable(level), limit)
        if decided is not None:
            decision = decided.decision
        elif not is_gated:
            is_worse = mean.lo > 0 and mean.value >= limit
            decision = pass_decision(evidence, level, limit) or (
                GateDecision.REGRESSION if is_worse else GateDecision.INCONCLUSIVE
            )
    least = 100 * (least if name in FRACTIONS else math.expm1(min(least, 20.0)))
    a, b = sides or (None, None)
    each = () if d is None else tuple(float(value) for value in d)
    return MetricResult(name, direction_of(name), is_gated, a, b, each, mean, decision, limit, least)
