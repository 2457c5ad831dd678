"""The gate: decides from pairs of runs whether B is worse than A.

The unit is the pair. Its statistic is d = ln(B / A), with the sign chosen so that positive is worse. For a fraction
(error rate) it is the difference B - A. A gated metric has regressed when the lower bound of mean(d) is above 0 and
mean(d) reaches the smallest effect of interest. It passes when the upper bound is below that effect. Otherwise it is
inconclusive.

Pairs are measured one after the other. The result is tested after each pair from `min_pairs` on; such a test is a look.
Pocock's rule corrects the bounds for several looks: each look has the same nominal level, and all looks together have
an error rate of `alpha` if nothing changed. Regressions of several gated metrics are claimed in Holm's order. The first
decision on a metric is final. The target is 5 % false alarms. `alpha` is half of it, so that the observed rate of a few
hundred comparisons also stays below the target.
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
from reports.metrics.requests.per_request import Direction
from reports.stats.estimators import Interval
from reports.text import plain_text

Array = npt.NDArray[np.float64]

DEFAULT_GATED = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "error_rate")
DEFAULT_SHOWN = ("requests_per_s", "ttft_p95_ms", "tpot_p95_ms", "e2e_p50_ms", "e2e_p95_ms", "gap_p99_ms")
MIN_EFFECT = 0.03
LEVEL_95 = 0.025
"""One-sided level of each end of a 95 % interval."""
CLEAR_EFFECT = 1.5
"""With low noise, 80 % of comparisons find a regression of this multiple of the smallest effect of interest."""
MAX_LOG = 700.0
"""The largest logarithm of a change that is converted to a percentage; `exp` of more overflows."""
MAX_SHOWN_LOG = 20.0
"""The largest logarithm of a detectable effect or of contention that is shown as a percentage."""


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


def judge(pairs: Sequence[Pair], options: CompareOptions | None = None) -> Comparison:
    """The verdict on the pairs so far, with a look after each pair; refuses invalid runs and runs of unlike settings.

    With fewer pairs than the first look needs, every metric is inconclusive. Raises KeyError for an unknown metric.
    """
    options = options or CompareOptions()
    refusals, notes = find_refusals(_named_runs(pairs), options.allow)
    label_a, label_b = (plain_text(pairs[0].a.label), plain_text(pairs[0].b.label)) if pairs else ("A", "B")
    base = Comparison(
        label_a,
        label_b,
        len(pairs),
        options,
        metrics=(),
        refusals=refusals,
        notes=notes,
        setting=setting_of(pairs[0].a) if pairs else "",
    )
    if refusals:
        return base
    contention = _contention(pairs) if options.equal_contention else None
    if options.equal_contention and pairs:
        notes += (contention_note(contention),)
    judged = replace(
        base,
        metrics=_judge_metrics(pairs, contention, options),
        requirements=judge_requirements([pair.b for pair in pairs], options),
        notes=notes,
        runs_a=len(pairs),
    )
    slices = min((len(pair.runs) for pair in pairs), default=1)
    return judged if slices == 1 else replace(judged, slices=slices, noise=split_noise(pairs, options.gated))


def _named_runs(pairs: Sequence[Pair]) -> list[tuple[str, SideRun]]:
    """Every run, with its place in the comparison: `pair 1, A`."""
    return [
        (f"pair {number}, {side}", run)
        for number, pair in enumerate(pairs, 1)
        for side, run in (("A", pair.a), ("B", pair.b))
    ]


def _judge_metrics(
    pairs: Sequence[Pair], contention: Array | None, options: CompareOptions
) -> tuple[MetricResult, ...]:
    """The gated metrics, and each shown metric that every run has. contention: [pairs], None for no adjustment."""
    differences = {name: _differences(pairs, name) for name in (*options.gated, *options.shown)}

    def evidence(name: str, look: int) -> Evidence | None:
        d = differences[name]
        if d is None or len(d) < look:
            return None
        if contention is None or name in FRACTIONS:
            return Evidence.of_pairs(d[:look])
        return Evidence.adjusted(d[:look], contention[:look])

    limits = {name: options.limit(name) for name in options.gated}
    decisions = decide(options.gated, evidence, limits, options.levels)
    results = []
    for name, d in differences.items():
        if d is None and name not in options.gated:
            continue
        decided = decisions.get(name)
        look = decided.look if decided is not None else 0 if d is None else len(d)
        medians = [median_of(run.values.get(name) for run in side) for side in _sides(pairs)]
        results.append(metric_result(name, medians, d, evidence(name, look) if look else None, decided, options))
    return tuple(results)


def judge_requirements(runs: Sequence[SideRun], options: CompareOptions) -> tuple[RequirementResult, ...]:
    """Each requirement with the median over the runs of side B."""
    return tuple(
        RequirementResult(found, median_of(run.values.get(found.metric) for run in runs))
        for found in map(Requirement.parse, options.require)
    )


def metrics_needed(options: CompareOptions) -> tuple[str, ...]:
    """Every metric that these options need in a `SideRun`."""
    required = [Requirement.parse(text).metric for text in options.require]
    return tuple(dict.fromkeys((*options.gated, *options.shown, *required)))


def _sides(pairs: Sequence[Pair]) -> tuple[list[SideRun], list[SideRun]]:
    """The runs of A, and the runs of B."""
    return [pair.a for pair in pairs], [pair.b for pair in pairs]


def _differences(pairs: Sequence[Pair], name: str) -> Array | None:
    """d of each pair; None if a run lacks the metric, or if its value has no logarithm."""
    a, b = (log_degradation([run.values.get(name) for run in side], name) for side in _sides(pairs))
    return None if a is None or b is None else b - a


def _contention(pairs: Sequence[Pair]) -> Array | None:
    """ln(contention of B / contention of A) in each pair; None if it is unknown for a run."""
    ratios = [
        pair.b.contention / pair.a.contention for pair in pairs if pair.a.contention and pair.b.contention is not None
    ]
    return np.log(ratios) if len(ratios) == len(pairs) else None


def contention_note(contention: Array | None) -> str:
    """A note on the adjustment: the contention of B against A, and a warning if they differ significantly."""
    if contention is None:
        return (
            "changes are not adjusted to equal contention: the kernel does not report how long the threads of a server "
            "waited"
        )
    bounds = Evidence.of_pairs(contention).bounds(LEVEL_95)
    lo, mean, hi = (100 * math.expm1(min(each, MAX_SHOWN_LOG)) for each in (bounds.lo, bounds.value, bounds.hi))
    text = (
        "changes are adjusted to equal contention, the time that the server's threads were ready to run over the time "
        f"that they ran; B's is {mean:+.1f} % against A's ({lo:+.1f} to {hi:+.1f})"
    )
    if bounds.lo <= 0 <= bounds.hi:
        return text
    return f"{text}. B itself may cause this difference, and the adjustment removes it: compare without it as well"


def metric_result(
    name: str,
    medians: Sequence[float | None],
    d: Array | None,
    evidence: Evidence | None,
    decided: FirstDecision | None,
    options: CompareOptions,
    *,
    can_claim: bool = True,
) -> MetricResult:
    """The result of one metric. medians: of A and B; `evidence`: at the look that decided, or over all pairs.

    can_claim: whether such runs can show a regression at all; otherwise no effect is found in 80 % of comparisons.
    """
    is_gated, limit = name in options.gated, options.limit(name)
    mean, smallest = Interval(math.nan, math.nan, math.nan), math.nan
    decision = GateDecision.NOT_MEASURED if d is None else GateDecision.INCONCLUSIVE
    if evidence is not None:
        level = options.levels.bounds_level
        mean = evidence.bounds(level)
        smallest = evidence.detectable(options.claim_level(is_gated), limit) if can_claim else math.inf
        if decided is not None:
            decision = decided.decision
        elif not is_gated:
            is_worse = mean.lo > 0 and mean.value >= limit
            decision = pass_decision(evidence, level, limit) or (
                GateDecision.REGRESSION if is_worse else GateDecision.INCONCLUSIVE
            )
    if smallest > MAX_SHOWN_LOG:
        smallest = math.inf
    smallest = 100 * (smallest if name in FRACTIONS else math.expm1(smallest))
    a, b = medians
    return MetricResult(
        name=name,
        direction=direction_of(name),
        is_gated=is_gated,
        a=a,
        b=b,
        d=() if d is None else tuple(float(value) for value in d),
        mean=mean,
        decision=decision,
        limit=limit,
        smallest_effect=smallest,
    )
