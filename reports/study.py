"""A tuning study as plain values: what the tuner hands over, and what its report reads off them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from reports.document import VerdictLine
from reports.per_request import Direction
from reports.stats import Interval, mean_interval

# Trials within the limits below which importances are a matter of luck.
LEAST_FOR_IMPORTANCE = 20


class TrialOutcome(StrEnum):
    """How a trial ended, as figures colour it."""

    FEASIBLE = "within every limit"
    VIOLATED = "beyond a limit"
    DEAD = "dead"
    FAILED = "not measured"


@dataclass(frozen=True, slots=True)
class Knob:
    """A searched setting; `scale` is how its axis is drawn, `unset` what None stands for.

    `low` and `high` are the ends of the range that was searched; None for a choice.
    """

    name: str
    default: Any = None
    scale: Literal["linear", "log", "category"] = "linear"
    unset: str = "default"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class StudyTrial:
    """One launch. `value` is the objective's; `metrics` are by the names that limits use (`ttft_p95_ms`).

    `confirms` is the number of the trial whose settings a confirming launch repeats, `round` which repetition it was.
    An anchor repeats the baseline between others. `started_s` counts from the study's start; `spent_s` holds seconds by
    phase (launch, warm, measure).
    """

    number: int
    settings: Mapping[str, Any]
    outcome: TrialOutcome
    value: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    confirms: int | None = None
    round: int | None = None
    is_anchor: bool = False
    missed: tuple[str, ...] = ()
    phase: str = ""
    cause: str = ""
    reason: str = ""
    log_line: str = ""
    started_s: float | None = None
    spent_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one changed setting is worth: the winner's gain with it, over the winner with it set back, as a ratio."""

    knob: str
    ratio: Interval


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator said of one metric of a trial, and what was measured.

    `how` says what it knew: `held out`, the other launches; `before launch`, those that had been made by then.
    """

    number: int
    how: str
    metric: str
    predicted: float
    measured: float

    @property
    def residual(self) -> float:
        """ln(measured / predicted)."""
        return math.log(self.measured / self.predicted)


@dataclass(frozen=True, slots=True)
class StudyData:
    """A study, whole. `verdict` opens the report; `objective` is a metric's name and `direction` its better side.

    `noise` is the relative standard deviation of a launch's objective, None where it was not measured; `gain` the
    winner's over the baseline as a ratio with its interval. `facts` are groups of names and values to repeat it by,
    `commands` the lines that do. `predictions` are the simulator's that were measured. `importances` are shares by
    knob; None lets the report compute them.
    """

    name: str
    verdict: VerdictLine
    objective: str
    knobs: tuple[Knob, ...]
    trials: tuple[StudyTrial, ...]
    direction: Direction = Direction.HIGHER
    limits: tuple[str, ...] = ()
    baseline: int | None = None
    winner: int | None = None
    gain: Interval | None = None
    noise: float | None = None
    is_confirmed: bool = False
    contributions: tuple[Contribution, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    importances: Mapping[str, float] | None = None
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    commands: tuple[str, ...] = ()
    subtitle: str = ""

    @property
    def objective_title(self) -> str:
        """The objective as an axis names it."""
        return f"{self.objective}  {self.direction.mark} better"

    @property
    def searched(self) -> tuple[StudyTrial, ...]:
        """Trials of the search itself, without anchors and confirming launches."""
        return tuple(trial for trial in self.trials if trial.confirms is None and not trial.is_anchor)

    @property
    def feasible(self) -> tuple[StudyTrial, ...]:
        return tuple(
            trial for trial in self.searched if trial.outcome is TrialOutcome.FEASIBLE and trial.value is not None
        )

    @property
    def moving_knobs(self) -> tuple[Knob, ...]:
        """Knobs that took more than one value."""
        return tuple(
            knob for knob in self.knobs if len({str(trial.settings.get(knob.name)) for trial in self.searched}) > 1
        )

    def trial(self, number: int | None) -> StudyTrial | None:
        """The searched trial of a number."""
        return next((trial for trial in self.searched if trial.number == number), None)

    @property
    def best(self) -> StudyTrial | None:
        """The winner, while there is none the best trial within every limit."""
        winner = self.trial(self.winner)
        if winner is not None or not self.feasible:
            return winner
        sign = 1.0 if self.direction is Direction.HIGHER else -1.0
        return max(self.feasible, key=lambda trial: sign * (trial.value or 0.0))

    def launches(self, number: int | None) -> tuple[StudyTrial, ...]:
        """The launches that speak for a trial: its confirming ones, else its own."""
        confirming = tuple(each for each in self.trials if each.confirms == number and each.confirms is not None)
        own = self.trial(number)
        return confirming or ((own,) if own is not None else ())

    def is_better(self, a: float, b: float) -> bool:
        return a > b if self.direction is Direction.HIGHER else a < b


# Share of a range within which a value is its end.
AT_THE_EDGE = 0.01


def at_the_edge(study: StudyData) -> dict[str, str]:
    """The settings whose best value is an end of the range that was searched, with a sentence: beyond it may be better.

    None of them where the baseline is the best: it was not searched for.
    """
    best = study.best
    if best is None or best.number == study.baseline:
        return {}
    found = {}
    for knob in study.knobs:
        value = best.settings.get(knob.name)
        if isinstance(value, int | float) and (end := _end_of(knob, value)) is not None:
            ends = f"{knob.low:.6g} to {knob.high:.6g}"
            found[knob.name] = f"the best value of `{knob.name}`, {value:.6g}, is the {end} edge of its range, {ends}"
    return found


def _end_of(knob: Knob, value: float) -> str | None:
    """Which end of a knob's range a value is."""
    low, high = knob.low, knob.high
    if low is None or high is None or high <= low:
        return None
    if knob.scale == "log":
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    share = (value - low) / (high - low)
    return "lower" if share <= AT_THE_EDGE else "upper" if share >= 1 - AT_THE_EDGE else None


def metric_of(trial: StudyTrial, name: str, objective: str) -> float | None:
    """A launch's value of a metric; the objective's is known without being listed."""
    found = trial.metrics.get(name)
    return trial.value if found is None and name == objective else found


def median_of(launches: Sequence[StudyTrial], name: str, objective: str) -> tuple[float, float, float] | None:
    """Median, least and most over launches; None where none has the metric."""
    values = [value for each in launches if (value := metric_of(each, name, objective)) is not None]
    return (statistics.median(values), min(values), max(values)) if values else None


def paired_change(a: Sequence[StudyTrial], b: Sequence[StudyTrial], name: str, objective: str) -> Interval | None:
    """B over A as a ratio: the mean of logarithms over rounds that both have; None where either lacks the metric."""
    logs = []
    for before, after in _pairs(a, b):
        old, new = metric_of(before, name, objective), metric_of(after, name, objective)
        if old is not None and new is not None and old > 0 and new > 0:
            logs.append(math.log(new / old))
    if not logs:
        return None
    found = mean_interval(np.array(logs))
    return Interval(math.exp(found.value), *(math.exp(end) if end == end else math.nan for end in (found.lo, found.hi)))


def _pairs(a: Sequence[StudyTrial], b: Sequence[StudyTrial]) -> list[tuple[StudyTrial, StudyTrial]]:
    """Launches of the same round; single launches make one pair."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    rounds = {each.round: each for each in a}
    return [(rounds[each.round], each) for each in b if each.round in rounds]
