"""Compares runs of B with stored runs of A. Weaker than pairs: a shift between occasions is taken for a change.

A regression is claimed only if the history shows how much a metric varies between occasions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reports.gate.compare import Array, judge_requirements, metric_result
from reports.gate.comparison import CompareOptions, Comparison, MetricResult
from reports.gate.decide import Evidence, FirstDecision, GateDecision, Levels, decide
from reports.gate.side_run import GateRefusal, SideRun, find_refusals, log_degradation, median_of, setting_of
from reports.text import plain_text

MIN_RUNS = 5
MIN_OCCASIONS = 5


@dataclass(frozen=True, slots=True)
class OccasionVariation:
    """Standard deviation of each metric between `occasions` without a change, in the unit of d."""

    deviations: Mapping[str, float]
    occasions: int

    @property
    def is_known(self) -> bool:
        return self.occasions >= MIN_OCCASIONS


UNKNOWN = OccasionVariation({}, 0)


def judge_stored(
    a: Sequence[SideRun],
    b: Sequence[SideRun],
    options: CompareOptions | None = None,
    between: OccasionVariation = UNKNOWN,
) -> Comparison:
    """The verdict on runs of B against stored runs of A: one look, Welch's t over runs.

    Refuses fewer than five stored runs, and runs of different device classes or drivers. Raises KeyError for an
    unknown metric.
    """
    options = options or CompareOptions()
    refusals, notes = find_refusals([*_named_runs("A", a), *_named_runs("B", b)], options.allow)
    if len(a) < MIN_RUNS:
        refusals += (GateRefusal(f"side A has {len(a)} stored runs but needs {MIN_RUNS}", is_usage=True),)
    base = Comparison(
        label_a=plain_text(a[0].label) if a else "A",
        label_b=plain_text(b[0].label) if b else "B",
        num_pairs=len(b),
        options=options,
        metrics=(),
        refusals=refusals,
        notes=(*notes, _stored_note(between)),
        runs_a=len(a),
        is_stored=True,
        setting=next((setting_of(run) for run in (*b, *a)), ""),
    )
    if refusals or not b:
        return base
    return replace(base, metrics=_judge_metrics(a, b, options, between), requirements=judge_requirements(b, options))


def _named_runs(side: str, runs: Sequence[SideRun]) -> Iterator[tuple[str, SideRun]]:
    """The runs of a side with their places; the device is added to the facts that all runs must share."""
    for number, run in enumerate(runs, 1):
        yield f"{side}, run {number}", replace(run, identity={**run.identity, **run.device})


def _judge_metrics(
    a: Sequence[SideRun], b: Sequence[SideRun], options: CompareOptions, between: OccasionVariation
) -> tuple[MetricResult, ...]:
    """The gated metrics, and each shown metric that every run has."""
    scaled = {name: _scaled(a, b, name) for name in (*options.gated, *options.shown)}
    evidence = {
        name: Evidence.of_sides(*sides, between.deviations.get(name, 0.0), between.occasions)
        for name, sides in scaled.items()
        if sides is not None
    }
    limits = {name: options.limit(name) for name in options.gated}
    levels = Levels((1,), options.alpha, options.pass_alpha)
    decisions = decide(options.gated, lambda name, _look: evidence.get(name), limits, levels)
    if not between.is_known:
        decisions = {name: _without_history(each) for name, each in decisions.items()}
    return tuple(
        metric_result(
            name,
            [median_of(run.values.get(name) for run in runs) for runs in (a, b)],
            None if sides is None else sides[1] - sides[0].mean(),
            evidence.get(name),
            decisions.get(name),
            replace(options, pairs=len(b)),
            can_claim=between.is_known,
        )
        for name, sides in scaled.items()
        if sides is not None or name in options.gated
    )


def _scaled(a: Sequence[SideRun], b: Sequence[SideRun], name: str) -> tuple[Array, Array] | None:
    """The values of both sides on the scale of d; None if a run lacks the metric."""
    side_a, side_b = (log_degradation([run.values.get(name) for run in runs], name) for runs in (a, b))
    return None if side_a is None or side_b is None else (side_a, side_b)


def _without_history(decided: FirstDecision) -> FirstDecision:
    """The decision without a history: pass or inconclusive."""
    passed = decided.decision in (GateDecision.PASS, GateDecision.IMPROVEMENT)
    return FirstDecision(GateDecision.PASS if passed else GateDecision.INCONCLUSIVE, decided.look)


def _stored_note(between: OccasionVariation) -> str:
    text = "Side A was measured on another occasion. This evidence is weaker than that of interleaved pairs"
    if between.is_known:
        return f"{text}. The bounds include the variation between {between.occasions} occasions in the history."
    return (
        f"{text}. The history has {between.occasions} occasions but a regression needs {MIN_OCCASIONS}; run the two "
        "sides in pairs to decide."
    )
