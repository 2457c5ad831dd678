"""B against runs of A that were stored earlier. Weaker than pairs: a shift between occasions looks like a change.

A regression is only claimed where history says how much a side moves from one occasion to the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reports.compare import (
    Array,
    CompareOptions,
    Comparison,
    Refusal,
    SideRun,
    find_refusals,
    judge_requirements,
    median_of,
    metric_result,
    setting_of,
    worseness,
)
from reports.decide import Decided, Decision, Evidence, Levels, decide
from reports.plain_text import plain_text

LEAST_RUNS = 5
LEAST_OCCASIONS = 5


@dataclass(frozen=True, slots=True)
class BetweenOccasions:
    """How much each metric moves between occasions when nothing changed: standard deviations in the unit of d."""

    deviations: Mapping[str, float]
    occasions: int

    @property
    def is_known(self) -> bool:
        return self.occasions >= LEAST_OCCASIONS


UNKNOWN = BetweenOccasions({}, 0)


def judge_stored(
    a: Sequence[SideRun],
    b: Sequence[SideRun],
    options: CompareOptions | None = None,
    between: BetweenOccasions = UNKNOWN,
) -> Comparison:
    """The verdict on runs of B against stored runs of A: one look, Welch's t over runs.

    Refuses fewer than five stored runs, and runs of another device class or driver. Raises KeyError for a metric that
    does not exist.
    """
    options = options or CompareOptions()
    label_a, label_b = (plain_text(runs[0].label) if runs else side for side, runs in (("A", a), ("B", b)))
    named = [
        (f"{side}, run {number}", replace(run, identity={**run.identity, **run.device}))
        for side, runs in (("A", a), ("B", b))
        for number, run in enumerate(runs, 1)
    ]
    refusals, notes = find_refusals(named, options)
    if len(a) < LEAST_RUNS:
        refusals += (Refusal(f"side A has {len(a)} stored runs, and {LEAST_RUNS} are needed", is_usage=True),)
    notes += (_weakness(between),)
    setting = setting_of(b[0] if b else a[0]) if a or b else ""
    base = Comparison(
        label_a, label_b, len(b), options, (), (), refusals, notes, len(a), is_stored=True, setting=setting
    )
    if refusals or not b:
        return base
    evidence: dict[str, Evidence | None] = {}
    differences: dict[str, Array | None] = {}
    for name in (*options.gated, *options.shown):
        side_a, side_b = (worseness([run.values.get(name) for run in runs], name) for runs in (a, b))
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


def _without_history(decided: Decided) -> Decided:
    """Without history the gate can only pass, or ask for pairs."""
    calm = decided.decision in (Decision.PASS, Decision.IMPROVEMENT)
    return Decided(Decision.PASS if calm else Decision.INCONCLUSIVE, decided.look)


def _weakness(between: BetweenOccasions) -> str:
    text = "Side A was measured on another occasion, which is weaker than interleaved pairs"
    if between.is_known:
        return f"{text}; the bounds hold what {between.occasions} occasions in history moved by."
    return (
        f"{text}. History has {between.occasions} of {LEAST_OCCASIONS} occasions that tell what moves between them, so "
        "a regression cannot be claimed: rerun paired to learn more."
    )
