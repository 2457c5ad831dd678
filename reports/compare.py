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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reports.decide import Decided, Decision, Evidence, Levels, calm_decision, decide
from reports.metrics import PER_RUN
from reports.per_request import LATENCY_NAME, PER_REQUEST, Direction
from reports.plain_text import plain_text
from reports.requirement import Requirement, RequirementResult
from reports.results import RunManifest
from reports.stats import Interval
from reports.summary import metric_value

Array = npt.NDArray[np.float64]

DEFAULT_GATED = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "error_rate")
DEFAULT_SHOWN = ("requests_per_s", "ttft_p95_ms", "tpot_p95_ms", "e2e_p50_ms", "e2e_p95_ms", "gap_p99_ms")
LEAST_EFFECT = 0.03
SHARES = frozenset(("error_rate", "slo_attainment", "token_timeliness", "little_residual"))


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

    @property
    def levels(self) -> Levels:
        return Levels(self.looks, self.alpha, self.pass_alpha)

    def limit(self, metric: str) -> float:
        """The smallest effect of interest, in the unit of d; never below 3 %."""
        return self.error_points if metric in SHARES else math.log1p(max(self.min_effect, LEAST_EFFECT))


@dataclass(frozen=True, slots=True)
class SideRun:
    """What the gate needs of one run: its metrics by name, its verdict, and what it must share with the others.

    `device` is what runs of different occasions must share too; `directory` holds its records, where they are kept.
    """

    label: str
    values: Mapping[str, float | None]
    status: str = "valid"
    reasons: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    started_at: str = ""
    directory: Path | None = None

    @classmethod
    def of(
        cls, manifest: RunManifest, summary: Mapping[str, Any], metrics: Sequence[str], directory: Path | None = None
    ) -> "SideRun":
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
        return cls(
            manifest.title,
            values,
            verdict["status"],
            reasons,
            identity,
            device_of(manifest),
            manifest.started_at,
            directory,
        )


def device_of(manifest: RunManifest) -> dict[str, Any]:
    """The class of device a run was made on, and its driver."""
    machine, target = manifest.machine, manifest.target
    processor = f"{machine.get('cpus_usable') or machine.get('cpu_count')} × {machine.get('cpu')}"
    return {"device class": target.get("accelerator") or processor, "driver": target.get("driver")}


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

    @classmethod
    def of(cls, message: str, *, is_usage: bool = False) -> "Refusal":
        """With text of servers and runs made plain."""
        return cls(plain_text(message), is_usage)


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
class Comparison:
    """The verdict on B against A and everything it rests on.

    Where the sides were not measured in pairs (`is_stored`), `num_pairs` counts the runs of B. `setting` says on what
    model, load mode and device they were measured, as far as runs tell.
    """

    label_a: str
    label_b: str
    num_pairs: int
    options: CompareOptions
    metrics: tuple[MetricResult, ...]
    requirements: tuple[RequirementResult, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    runs_a: int = 0
    is_stored: bool = False
    setting: str = ""

    @property
    def size(self) -> str:
        """`8 interleaved pairs of runs`; of stored runs how many each side has."""
        if self.is_stored:
            return f"{self.num_pairs} runs of B against {self.runs_a} stored runs of A, not interleaved"
        return f"{self.num_pairs} interleaved pairs of runs"

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
    label_a, label_b = (plain_text(pairs[0].a.label), plain_text(pairs[0].b.label)) if pairs else ("A", "B")
    named = [(f"pair {number}, {side}", run) for number, pair in enumerate(pairs, 1) for side, run in _sides(pair)]
    refusals, notes = find_refusals(named, options)
    setting = setting_of(pairs[0].a) if pairs else ""
    if refusals:
        return Comparison(label_a, label_b, len(pairs), options, (), (), refusals, notes, setting=setting)
    differences = {name: _differences(pairs, name) for name in (*options.gated, *options.shown)}

    def evidence(name: str, look: int) -> Evidence | None:
        d = differences[name]
        return Evidence.of_pairs(d[:look]) if d is not None and len(d) >= look else None

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
    return Comparison(label_a, label_b, *counts, *judged, (), notes, len(pairs), setting=setting)


def setting_of(run: SideRun) -> str:
    """`preset:tiny-llama · closed load · 2 × AMD EPYC 9B14`."""
    mode = run.identity.get("load mode")
    parts = (run.identity.get("model"), f"{mode} load" if mode else None, run.device.get("device class"))
    return plain_text(" · ".join(str(part) for part in parts if part))


def judge_requirements(runs: Sequence[SideRun], options: CompareOptions) -> tuple[RequirementResult, ...]:
    """The fixed limits, held against the medians of a side's runs."""
    return tuple(
        RequirementResult(found, median_of(run.values.get(found.metric) for run in runs))
        for found in map(Requirement.parse, options.require)
    )


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


def find_refusals(
    runs: Sequence[tuple[str, SideRun]], options: CompareOptions
) -> tuple[tuple[Refusal, ...], tuple[str, ...]]:
    """What forbids to judge these runs, each with the words for where it stands; and what is worth a note."""
    refusals = [
        Refusal.of(f"{where} ({run.label}) is invalid: {'; '.join(run.reasons) or 'no reason given'}")
        for where, run in runs
        if run.status == "invalid"
    ]
    notes = [
        plain_text(f"{where} ({run.label}) is degraded: {'; '.join(run.reasons)}")
        for where, run in runs
        if run.status == "degraded"
    ]
    expected = runs[0][1].identity if runs else {}
    for name, value in expected.items():
        odd = next(((where, run) for where, run in runs if run.identity.get(name) != value), None)
        if odd is None:
            continue
        where, run = odd
        text = plain_text(f"{name} differs: {value} in {runs[0][0]}; {run.identity.get(name)} in {where}")
        if name in options.allow:
            notes.append(f"{text} (allowed)")
        else:
            refusals.append(Refusal(f"the runs are not alike, {text}", is_usage=True))
    return tuple(refusals), tuple(notes)


def _sides(pair: Pair) -> tuple[tuple[str, SideRun], ...]:
    return (("A", pair.a), ("B", pair.b))


def _runs(pair: Pair) -> tuple[SideRun, SideRun]:
    return (pair.a, pair.b)


def _differences(pairs: Sequence[Pair], name: str) -> Array | None:
    """d of each pair; None where a run lacks the metric or it cannot be compared on the log scale."""
    sides = [worseness([run.values.get(name) for run in side], name) for side in zip(*map(_runs, pairs), strict=True)]
    if not sides:
        return np.array([])
    return None if sides[0] is None or sides[1] is None else sides[1] - sides[0]


def worseness(values: Sequence[float | None], name: str) -> Array | None:
    """Values on the scale of d, where more is worse: logarithms, but shares as they are; None where one is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or (name not in SHARES and any(value <= 0 for value in known)):
        return None
    turn = -1.0 if direction_of(name) is Direction.HIGHER else 1.0
    return turn * (np.array(known) if name in SHARES else np.log(known))


def metric_result(
    name: str,
    sides: Sequence[float | None],
    d: Array | None,
    evidence: Evidence | None,
    decided: Decided | None,
    options: CompareOptions,
) -> MetricResult:
    """One metric's row: the medians of both sides, the evidence at the deciding look, and the decision."""
    is_gated, limit = name in options.gated, options.limit(name)
    mean, least = Interval(math.nan, math.nan, math.nan), math.nan
    decision = Decision.NOT_MEASURED if d is None else Decision.INCONCLUSIVE
    if evidence is not None:
        level = options.levels.of_bounds
        mean = evidence.bounds(level)
        least = max(evidence.detectable(level), limit)
        if decided is not None:
            decision = decided.decision
        elif not is_gated:
            is_worse = mean.lo > 0 and mean.value >= limit
            decision = calm_decision(evidence, level, limit) or (
                Decision.REGRESSION if is_worse else Decision.INCONCLUSIVE
            )
    least = 100 * (least if name in SHARES else math.expm1(min(least, 20.0)))
    a, b = sides or (None, None)
    each = () if d is None else tuple(float(value) for value in d)
    return MetricResult(name, direction_of(name), is_gated, a, b, each, mean, decision, limit, least)


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of what is known; None of nothing."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
