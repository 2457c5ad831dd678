"""The answer of a study: the settings to change, the command that applies them, and the metrics that get worse."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from reports.document import Block, Estimate, Table, Text, VerdictLine, format_bounds, format_number
from reports.metrics.requests.per_request import Direction
from reports.metrics.titles import better_direction, metric_title
from reports.stats.estimators import Interval
from reports.study import StudyData, StudyTrial, at_range_end, default_text, median_of, paired_change, setting_text

MIN_COST = 0.05
"""The verdict names a metric that gets worse by more than this fraction."""


def answer_verdict(study: StudyData) -> VerdictLine:
    """The verdict with the costs and the load of the winner, and a reason for each setting at the end of its range."""
    verdict = study.verdict
    sentence = verdict.sentence.replace(study.objective, metric_title(study.objective).partition(", ")[0])
    sentences = [sentence[:1].upper() + sentence[1:]]
    found = costs(study)
    if found:
        sentences[0] = _ended(sentences[0])
        sentences.append(f"It costs: {'; '.join(map(str, found))}.")
    if study.load and study.winner is not None:
        sentences[-1] = _ended(sentences[-1])
        sentences.append(f"This holds for the load of the study: {study.load}.")
    reasons = tuple(reason[:1].upper() + reason[1:] for reason in (*verdict.reasons, *at_range_end(study).values()))
    return dataclasses.replace(verdict, sentence=" ".join(sentences), reasons=reasons)


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith(".") else f"{sentence}."


@dataclass(frozen=True, slots=True)
class Cost:
    """A metric that is worse with the winner.

    change: a ratio; None if the metric was zero before. factor: how many times worse, infinite after zero.
    """

    metric: str
    before: float
    after: float
    change: Interval | None
    factor: float

    def __str__(self) -> str:
        title, _, unit = metric_title(self.metric).partition(", ")
        scale = 100 if unit == "fraction" else 1
        before, after = (format_number(scale * float(each)) for each in (self.before, self.after))
        values = f"{title} {before} → {after} {'%' if unit == 'fraction' else unit}".rstrip()
        return values if self.change is None else f"{values} ({_percent(self.change)})"


def _percent(ratio: Interval) -> str:
    """The change as text: `+75 %, 95 % interval +57 to +95`."""
    value, lo, hi = (100 * (end - 1) for end in (ratio.value, ratio.lo, ratio.hi))
    text = f"{value:+,.0f} %".replace("-", "\N{MINUS SIGN}")
    if lo != lo or hi != hi:
        return text
    ends = (end if end.startswith("\N{MINUS SIGN}") else f"+{end}" for end in format_bounds(lo, hi))
    return f"{text}, 95 % interval {' to '.join(ends)}"


def costs(study: StudyData) -> tuple[Cost, ...]:
    """The metrics that are worse with the winner than with the baseline by more than `MIN_COST`, worst first."""
    if study.winner is None or study.winner == study.baseline:
        return ()
    a, b = study.launches(study.baseline), study.launches(study.winner)
    names = {name for each in (*a, *b) for name in each.metrics} - {study.objective}
    found = [_cost(name, a, b, study.objective) for name in sorted(names)]
    return tuple(sorted((cost for cost in found if cost is not None), key=lambda cost: -cost.factor))


def _cost(name: str, a: Sequence[StudyTrial], b: Sequence[StudyTrial], objective: str) -> Cost | None:
    """The cost of one metric; None if it is not known to be worse by more than `MIN_COST`."""
    before, after = (median_of(launches, name, objective) for launches in (a, b))
    direction = better_direction(name)
    if before is None or after is None or direction is Direction.NONE:
        return None
    change = paired_change(a, b, name, objective)
    if change is None:
        has_appeared = before[0] == 0 < after[0] and direction is Direction.LOWER
        return Cost(name, before[0], after[0], None, math.inf) if has_appeared else None
    factor = change.value if direction is Direction.LOWER else 1 / change.value
    return Cost(name, before[0], after[0], change, factor) if factor > 1 + MIN_COST else None


def settings_blocks(study: StudyData) -> tuple[Block, ...]:
    """The changed settings, default and best, and the command that starts the server with them."""
    winner, baseline = study.trial(study.winner), study.trial(study.baseline)
    if winner is None or baseline is None or winner.number == baseline.number:
        return ()
    contributions = {each.knob: each.ratio for each in study.contributions}
    rows = [
        {
            "setting": knob.name,
            "default": default_text(knob, baseline),
            "best": setting_text(knob, winner),
            **({"contribution, %": _contribution(contributions.get(knob.name))} if contributions else {}),
        }
        for knob in study.knobs
        if knob.value_of(winner) != knob.value_of(baseline)
    ]
    if not rows:
        return ()
    note = "Contribution: the winner against the winner with only this setting reset." if contributions else ""
    command = (Text(study.command, is_code=True, has_copy=True),) if study.command else ()
    return (Table("", pd.DataFrame(rows), note), *command)


def _contribution(ratio: Interval | None) -> Estimate | None:
    if ratio is None:
        return None
    value, lo, hi = (100 * (end - 1) for end in (ratio.value, ratio.lo, ratio.hi))
    return Estimate(value, lo, hi, is_change=True)
