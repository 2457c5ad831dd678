"""Compares runs of B with stored runs of A. Weaker than pairs: a shift between occasions is taken for a change.

A regression is claimed only if the history shows how much a metric varies between occasions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reports.gate.compare import Array, CompareOptions, Comparison, judge_requirements, metric_result
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
    label_a, label_b = (plain_text(runs[0].label) if runs else side for side, runs in (("A", a), ("B", b)))
    named = [
        (f"{side}, run {number}", replace(run, identity={**run.identity, **run.device}))
        for side, runs in (("A", a), ("B", b))
        for number, run in enumerate(runs, 1)
    ]
    refusals, notes = find_refusals(named, options.allow)
    if len(a) < MIN_RUNS:
        refusals += (GateRefusal(f"side A has {len(a)} stored runs but needs {MIN_RUNS}", is_usage=True),)
    notes += (_stored_note(between),)
    setting = setting_of(b[0] if b else a[0]) if a or b else ""
    base = Comparison(
        label_a, label_b, len(b), options, (), (), refusals, notes, len(a), is_stored=True, setting=setting
    )
    if refusals or not b:
        return base
    evidence: dict[str, Evidence | None] = {}
    differences: dict[str, Array | None] = {}
    for name in (*options.gated, *options.shown):
        side_a, side_b = (log_degradation([run.values.get(name) for run in runs], name) for runs in (a, b))
        differences[name], evidence[name] = None, None
        if side_a is not None and side_b is not None:
            differences[name] = side_b - side_a.mean()
            evidence[name] = Evidence.of_sides(side_a, side_b, between.deviations.get(name, 0.0), between.occasions)
    limits = {name: options.limit(name) for name in options.gated}
    levels = Levels((1,), options.alpha, options.pass_alpha)
    found = decide(options.gated, lambda name, _look: evidence[name], limits, levels)
    decisions = found if between.is_known else {name: _without_history(each) for name, each in found.items()}
    metrics = tuple(
        metric_result(
            name,
            [median_of(run.values.get(name) for run in runs) for runs in (a, b)],
            differences[name],
            evidence[name],
            decisions.get(name),
            replace(options, pairs=len(b)),
        )
        for name in evidence
        if evidence[name] is not None or name in options.gated
    )
    return replace(base, metrics=metrics, requirements=judge_requirements(b, options))


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
