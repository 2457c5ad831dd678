"""The gate's statistics: is B worse than A, from pairs of runs?

The pair is the unit. Its statistic is d = ln(B / A), sign turned so that positive is worse; for a share (error rate) it
is the difference B - A. A gated metric has regressed when the lower bound of mean(d) is above 0 and mean(d) reaches
the smallest effect of interest; it passes when the upper bound is below that effect; else it is inconclusive.

Pairs come one by one, and every one from `min_pairs` on is a look. The bounds are widened for that by Pocock's rule:
the same nominal level at each look, such that all looks together err in `alpha` of cases where nothing changed. Over
several gated metrics, regressions are claimed in Holm's order. A metric's first decision stands. The promise is 5 %
false alarms; regressions are claimed at half of it, so that the share seen in a few hundred comparisons keeps it too,
and not merely its expectation.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from reports.metrics import PER_RUN
from reports.per_request import LATENCY_NAME, PER_REQUEST, Direction
from reports.results import RunManifest
from reports.sequential import nominal_level, smallest_effect
from reports.stats import Interval, student
from reports.summary import metric_value

Array = npt.NDArray[np.float64]

DEFAULT_GATED = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "error_rate")
DEFAULT_SHOWN = ("requests_per_s", "ttft_p95_ms", "tpot_p95_ms", "e2e_p50_ms", "e2e_p95_ms", "gap_p99_ms")
LEAST_EFFECT = 0.03
SHARES = frozenset(("error_rate", "slo_attainment", "token_timeliness", "little_residual"))


class Decision(StrEnum):
    """What the pairs say of one metric, or of the whole comparison."""

    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    PASS = "pass"
    IMPROVEMENT = "improvement"
    NOT_MEASURED = "not_measured"


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How to judge. `pairs` fixes their number, which makes a single look; `allow` names differences to overlook.

    `alpha`: share of false regressions over all gated metrics and looks; `pass_alpha`: that of one metric's bounds.
    `inconclusive` is what an inconclusive result returns: report (3), pass (0) or fail (1).
    """

    gated: tuple[str, ...] = DEFAULT_GATED
    shown: tuple[str, ...] = DEFAULT_SHOWN
    min_effect: float = LEAST_EFFECT
    error_points: float = 0.005
    min_pairs: int = 4
    max_pairs: int = 12
    pairs: int | None = None
    alpha: float = 0.025
    pass_alpha: float = 0.05
    inconclusive: str = "report"
    allow: frozenset[str] = frozenset()
    require: tuple[str, ...] = ()

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of pairs at which the result is looked at."""
        return (self.pairs,) if self.pairs else tuple(range(self.min_pairs, self.max_pairs + 1))

    def limit(self, metric: str) -> float:
        """The smallest effect of interest, in the unit of d; never below 3 %."""
        return self.error_points if metric in SHARES else math.log1p(max(self.min_effect, LEAST_EFFECT))


@dataclass(frozen=True, slots=True)
class SideRun:
    """What the gate needs of one run: its metrics by name, its verdict, and what it must share with the others."""

    label: str
    values: Mapping[str, float | None]
    status: str = "valid"
    reasons: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: RunManifest, summary: Mapping[str, Any], metrics: Sequence[str]) -> "SideRun":
        """From a stored run. Raises KeyError for a metric that does not exist."""
        values = {name: metric_value(summary, name, manifest.is_open_loop) for name in metrics}
        info = manifest.target.get("info") or {}
        identity = {
            "workload hash": manifest.workload_hash,
            "schedule hash": manifest.schedule_hash,
            "load mode": manifest.mode,
            "objectives": manifest.objectives,
            "model": info.get("model_id"),
            "length control": manifest.length_control,
            "cache mode": manifest.prefix_cache,
            "schema version": manifest.schema_version,
        }
        verdict = summary["verdict"]
        reasons = tuple(reason["message"] for reason in verdict["reasons"])
        return cls(manifest.title, values, verdict["status"], reasons, identity)


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each side, measured back to back."""

    a: SideRun
    b: SideRun


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why runs were not judged; `is_usage` where they should never have been put together."""

    message: str
    is_usage: bool = False


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric of a comparison. `d` has one value per pair; bounds and mean are those at the deciding look.

    `mean` and its bounds are in the unit of d: positive is worse. `smallest_effect` is what these pairs would have
    shown in four of five cases, as a change in percent (for shares in points).
    """

    name: str
    direction: Direction
    is_gated: bool
    a: float | None
    b: float | None
    d: tuple[float, ...]
    mean: Interval
    decision: Decision
    limit: float
    smallest_effect: float

    @property
    def is_share(self) -> bool:
        return self.name in SHARES

    @property
    def change(self) -> Interval:
        """B against A as people say it: in percent of A, or in percentage points; the sign is that of the value."""
        turn = -1.0 if self.direction is Direction.HIGHER else 1.0
        convert = (lambda x: 100 * x) if self.is_share else (lambda x: 100 * math.expm1(x))
        ends = sorted(convert(turn * end) for end in (self.mean.lo, self.mean.hi))
        return Interval(convert(turn * self.mean.value), ends[0], ends[1])

    @property
    def change_unit(self) -> str:
        return "points" if self.is_share else "%"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A fixed limit on side B, such as `ttft_p95_ms < 800`."""

    metric: str
    operator: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Requirement":
        """Raises ValueError, naming the form, for anything else."""
        match = re.fullmatch(r"\s*([a-z0-9_.]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*", text)
        if match is None:
            raise ValueError(f'`{text}` is no requirement; write it as "ttft_p95_ms < 800"')
        return cls(match[1], match[2], float(match[3]))

    def is_met(self, value: float) -> bool:
        met = {"<": value < self.bound, "<=": value <= self.bound, ">": value > self.bound, ">=": value >= self.bound}
        return met[self.operator]

    def __str__(self) -> str:
        return f"{self.metric} {self.operator} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class RequirementResult:
    """A requirement and the median of side B's runs."""

    requirement: Requirement
    value: float | None

    @property
    def is_met(self) -> bool:
        return self.value is not None and self.requirement.is_met(self.value)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on B against A and everything it rests on."""

    label_a: str
    label_b: str
    num_pairs: int
    options: CompareOptions
    metrics: tuple[MetricResult, ...]
    requirements: tuple[RequirementResult, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def gated(self) -> tuple[MetricResult, ...]:
        return tuple(metric for metric in self.metrics if metric.is_gated)

    @property
    def verdict(self) -> Decision:
        """The worst of the gated decisions; improvement only where nothing is worse or open."""
        decisions = {metric.decision for metric in self.gated}
        if self.refusals or Decision.NOT_MEASURED in decisions or not decisions:
            return Decision.NOT_MEASURED
        order = (Decision.REGRESSION, Decision.INCONCLUSIVE, Decision.IMPROVEMENT, Decision.PASS)
        return next(decision for decision in order if decision in decisions)

    @property
    def is_decided(self) -> bool:
        """Whether more pairs would change nothing."""
        return bool(self.metrics) and all(metric.decision is not Decision.INCONCLUSIVE for metric in self.gated)

    @property
    def exit_code(self) -> int:
        """0 pass or improvement, 1 regression or requirement missed, 2 unlike runs, 3 inconclusive, 4 not measured."""
        if any(refusal.is_usage for refusal in self.refusals):
            return 2
        if self.verdict is Decision.NOT_MEASURED:
            return 4
        if self.verdict is Decision.REGRESSION or any(not result.is_met for result in self.requirements):
            return 1
        if self.verdict is Decision.INCONCLUSIVE:
            return {"report": 3, "pass": 0, "fail": 1}[self.options.inconclusive]
        return 0

    @property
    def worst(self) -> MetricResult | None:
        """The gated metric that is most in question: the largest mean(d) relative to its limit."""
        return max(self.gated, key=lambda metric: metric.mean.value / metric.limit, default=None)


def judge(pairs: Sequence[Pair], options: CompareOptions | None = None) -> Comparison:
    """The verdict on the pairs so far, as a sequence of looks; refuses invalid and unlike runs by name.

    With fewer pairs than the first look everything is inconclusive. Raises KeyError for a metric that does not exist.
    """
    options = options or CompareOptions()
    label_a, label_b = (pairs[0].a.label, pairs[0].b.label) if pairs else ("A", "B")
    refusals, notes = _refusals(pairs, options)
    if refusals:
        return Comparison(label_a, label_b, len(pairs), options, (), (), refusals, notes)
    differences = {name: _differences(pairs, name) for name in (*options.gated, *options.shown)}
    decisions = _decide({name: differences[name] for name in options.gated}, options)
    metrics = tuple(
        _result(name, pairs, d, decisions.get(name), options)
        for name, d in differences.items()
        if d is not None or name in options.gated
    )
    requirements = tuple(
        RequirementResult(found, _median(pair.b.values.get(found.metric) for pair in pairs))
        for found in map(Requirement.parse, options.require)
    )
    return Comparison(label_a, label_b, len(pairs), options, metrics, requirements, (), notes)


def metrics_needed(options: CompareOptions) -> tuple[str, ...]:
    """Every metric that a `SideRun` must hold for these options."""
    required = [Requirement.parse(text).metric for text in options.require]
    return tuple(dict.fromkeys((*options.gated, *options.shown, *required)))


def direction_of(metric: str) -> Direction:
    """Which way of a metric is better, by the name that limits use."""
    known = {each.name: each.direction for each in PER_RUN} | {each.name: each.direction for each in PER_REQUEST}
    if metric in known:
        return known[metric]
    match = LATENCY_NAME.fullmatch(metric)
    if match is None:
        raise KeyError(metric)
    return Direction.LOWER


def _refusals(pairs: Sequence[Pair], options: CompareOptions) -> tuple[tuple[Refusal, ...], tuple[str, ...]]:
    runs = [(f"pair {number}, {side}", run) for number, pair in enumerate(pairs, 1) for side, run in _sides(pair)]
    refusals = [
        Refusal(f"{where} ({run.label}) is invalid: {'; '.join(run.reasons) or 'no reason given'}")
        for where, run in runs
        if run.status == "invalid"
    ]
    notes = [
        f"{where} ({run.label}) is degraded: {'; '.join(run.reasons)}"
        for where, run in runs
        if run.status == "degraded"
    ]
    expected = runs[0][1].identity if runs else {}
    for name, value in expected.items():
        odd = next(((where, run) for where, run in runs if run.identity.get(name) != value), None)
        if odd is None:
            continue
        where, run = odd
        text = f"{name} differs: {value} in pair 1, A; {run.identity.get(name)} in {where}"
        if name in options.allow:
            notes.append(f"{text} (allowed)")
        else:
            refusals.append(Refusal(f"the runs are not alike, {text}", is_usage=True))
    return tuple(refusals), tuple(notes)


def _sides(pair: Pair) -> tuple[tuple[str, SideRun], ...]:
    return (("A", pair.a), ("B", pair.b))


def _differences(pairs: Sequence[Pair], name: str) -> Array | None:
    """d of each pair; None where a run lacks the metric or it cannot be compared on the log scale."""
    turn = -1.0 if direction_of(name) is Direction.HIGHER else 1.0
    found = []
    for pair in pairs:
        a, b = pair.a.values.get(name), pair.b.values.get(name)
        if a is None or b is None or (name not in SHARES and (a <= 0 or b <= 0)):
            return None
        found.append(turn * (b - a if name in SHARES else math.log(b / a)))
    return np.array(found)


@dataclass(frozen=True, slots=True)
class _Decided:
    decision: Decision
    pairs: int


def _decide(gated: Mapping[str, Array | None], options: CompareOptions) -> dict[str, _Decided]:
    """Each metric's first decision over the looks."""
    decided = {name: _Decided(Decision.NOT_MEASURED, 0) for name, d in gated.items() if d is None}
    measured = {name: d for name, d in gated.items() if d is not None}
    level = nominal_level(options.looks, options.pass_alpha)
    rejected = 0
    for look in options.looks:
        open_ones = {name: d[:look] for name, d in measured.items() if name not in decided and len(d) >= look}
        by_evidence = sorted((_p_worse(d), name) for name, d in open_ones.items())
        for p, name in by_evidence:
            if p > nominal_level(options.looks, options.alpha / (len(gated) - rejected)):
                break
            if float(open_ones[name].mean()) >= options.limit(name):
                decided[name] = _Decided(Decision.REGRESSION, look)
                rejected += 1
        for name, d in open_ones.items():
            if name not in decided and (calm := _calm(d, level, options.limit(name))) is not None:
                decided[name] = _Decided(calm, look)
    return decided


def _calm(d: Array, level: float, limit: float) -> Decision | None:
    """Pass or improvement, if the upper bound allows it."""
    bounds = _bounds(d, level)
    if bounds.hi < 0 and bounds.value <= -limit:
        return Decision.IMPROVEMENT
    return Decision.PASS if bounds.hi < limit else None


def _p_worse(d: Array) -> float:
    """One-sided p-value of mean(d) <= 0; of equal values, 0 if they are positive."""
    mean, error = float(d.mean()), _error(d)
    if error == 0:
        return 0.0 if mean > 0 else 1.0
    return float(special.stdtr(len(d) - 1, -mean / error))


def _error(d: Array) -> float:
    return float(np.std(d, ddof=1)) / math.sqrt(len(d)) if len(d) > 1 else math.inf


def _bounds(d: Array, level: float) -> Interval:
    """mean(d) with its lower and upper one-sided bounds, each at 1 - level."""
    mean, error = float(d.mean()), _error(d)
    half = 0.0 if error == 0 else student(1 - level, len(d) - 1) * error if len(d) > 1 else math.inf
    return Interval(mean, mean - half, mean + half)


def _result(
    name: str, pairs: Sequence[Pair], d: Array | None, decided: _Decided | None, options: CompareOptions
) -> MetricResult:
    level = nominal_level(options.looks, options.pass_alpha)
    values = [_median(run.values.get(name) for run in side) for side in ([p.a for p in pairs], [p.b for p in pairs])]
    used = d if d is None or decided is None or not decided.pairs else d[: decided.pairs]
    limit = options.limit(name)
    if used is None or not len(used):
        mean, least = Interval(math.nan, math.nan, math.nan), math.nan
        decision = Decision.INCONCLUSIVE if used is not None else Decision.NOT_MEASURED
    else:
        mean = _bounds(used, level)
        least = (
            max(smallest_effect(float(np.std(used, ddof=1)), len(used), level), limit) if len(used) > 1 else math.inf
        )
        decision = decided.decision if decided else Decision.INCONCLUSIVE
        if name not in options.gated:
            is_worse = mean.lo > 0 and mean.value >= limit
            decision = _calm(used, level, limit) or (Decision.REGRESSION if is_worse else Decision.INCONCLUSIVE)
    least = 100 * (least if name in SHARES else math.expm1(min(least, 20.0)))
    return MetricResult(
        name,
        direction_of(name),
        name in options.gated,
        values[0],
        values[1],
        () if d is None else tuple(float(each) for each in d),
        mean,
        decision,
        limit,
        least,
    )


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
