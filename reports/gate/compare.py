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
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from reports.gate.comparison import LEVEL_95, CompareOptions, Comparison, MetricResult
from reports.gate.decide import Evidence, FirstDecision, GateDecision, decide, pass_decision
from reports.gate.noise_split import split_noise
from reports.gate.requirements import Requirement, RequirementResult
from reports.gate.side_run import (
    FRACTIONS,
    Pair,
    SideRun,
    direction_of,
    find_refusals,
    log_degradation,
    median_of,
    setting_of,
)
from reports.stats.estimators import Interval
from reports.text import plain_text

Array = npt.NDArray[np.float64]

MAX_SHOWN_LOG = 20.0
"""The largest logarithm of a detectable effect or of contention that is shown as a percentage."""


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
