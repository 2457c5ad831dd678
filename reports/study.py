"""A tuning study as plain values, the input of its report, and quantities derived from them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from reports.document import VerdictLine
from reports.metrics.requests.per_request import Direction
from reports.stats.estimators import Interval, mean_interval

MIN_TRIALS_FOR_IMPORTANCE = 20
"""Fewest feasible trials for importances; from fewer trials they are mostly noise."""


class TrialOutcome(StrEnum):
    """How a trial ended; each outcome has its own colour and shape in figures."""

    FEASIBLE = "within every limit"
    VIOLATED = "beyond a limit"
    NOT_SERVED = "could not serve"
    FAILED = "not measured"


@dataclass(frozen=True, slots=True)
class Knob:
    """A searched setting. scale: of its axis. unset: the text for None.

    low, high: the ends of the searched range; None for a choice.
    """

    name: str
    default: Any = None
    scale: Literal["linear", "log", "category"] = "linear"
    unset: str = "default"
    low: float | None = None
    high: float | None = None

    def value_of(self, trial: "StudyTrial") -> Any:
        """The value in a trial; for an unset one, the default if it is known."""
        value = trial.settings.get(self.name)
        return self.default if value is None else value


@dataclass(frozen=True, slots=True)
class StudyTrial:
    """One launch.

    value: of the objective. metrics: by their names in limits (`ttft_p95_ms`). missed: the limits that it exceeded.
    confirms, round: for a confirming launch, the number of the trial whose settings it repeats, and the repetition.
    is_drift_check: it repeats the baseline between other trials.
    phase, cause, reason, log_line: of a failure.
    started_s: since the study's start. spent_s: seconds by phase (launch, warm, measure).
    page: the address of its run's page, relative to the page of the study.
    """

    number: int
    settings: Mapping[str, Any]
    outcome: TrialOutcome
    value: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    confirms: int | None = None
    round: int | None = None
    is_drift_check: bool = False
    missed: tuple[str, ...] = ()
    phase: str = ""
    cause: str = ""
    reason: str = ""
    log_line: str = ""
    started_s: float | None = None
    spent_s: Mapping[str, float] = field(default_factory=dict)
    page: str = ""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The contribution of one changed setting: the ratio of the winner to the winner with this setting reset."""

    knob: str
    ratio: Interval


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's prediction of one metric of a trial, and the measured value.

    how: `held out` (the simulator was fitted to all other launches) or `before launch` (fitted to earlier launches).
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
    """A complete study.

    objective, direction: a metric, and its better direction.
    gain: the ratio of trial `compared`, the best finalist, to the baseline, with its interval.
    limits_kept: by trial, the probability that it keeps each limit; None if single launches do not show it.
    noise: relative standard deviation of the objective between launches; None if it was not measured.
    predictions: those with a measured value. importances: fractions by setting; if None, the report computes them.
    facts, commands: how to reproduce the study.
    command: starts the server with the best settings. load: the load for which they are best. server: program, model.
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
    compared: int | None = None
    limits_kept: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)
    noise: float | None = None
    is_confirmed: bool = False
    contributions: tuple[Contribution, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    importances: Mapping[str, float] | None = None
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    commands: tuple[str, ...] = ()
    command: str = ""
    load: str = ""
    server: str = ""

    @property
    def searched(self) -> tuple[StudyTrial, ...]:
        """The trials of the search, without drift checks and confirming launches."""
        return tuple(trial for trial in self.trials if trial.confirms is None and not trial.is_drift_check)

    @property
    def feasible(self) -> tuple[StudyTrial, ...]:
        return tuple(
            trial for trial in self.searched if trial.outcome is TrialOutcome.FEASIBLE and trial.value is not None
        )

    @property
    def moving_knobs(self) -> tuple[Knob, ...]:
        """The settings with more than one value in the search."""
        return tuple(
            knob for knob in self.knobs if len({str(trial.settings.get(knob.name)) for trial in self.searched}) > 1
        )

    def trial(self, number: int | None) -> StudyTrial | None:
        """The searched trial with a number."""
        return next((trial for trial in self.searched if trial.number == number), None)

    @property
    def best(self) -> StudyTrial | None:
        """The winner; without a winner, the best trial within every limit."""
        winner = self.trial(self.winner)
        if winner is not None or not self.feasible:
            return winner
        sign = 1.0 if self.direction is Direction.HIGHER else -1.0
        return max(self.feasible, key=lambda trial: sign * (trial.value or 0.0))

    def launches(self, number: int | None) -> tuple[StudyTrial, ...]:
        """The launches that represent a trial: its confirming launches, else its own launch."""
        confirming = tuple(each for each in self.trials if each.confirms == number and each.confirms is not None)
        own = self.trial(number)
        return confirming or ((own,) if own is not None else ())

    def is_better(self, a: float, b: float) -> bool:
        return a > b if self.direction is Direction.HIGHER else a < b


EDGE_FRACTION = 0.01
"""A value within this fraction of a range from its end is at the end."""


def at_range_end(study: StudyData) -> dict[str, str]:
    """The settings whose best value is at an end of the searched range, with a sentence about it.

    A wider range may be better. Empty if the baseline is the best trial: its values do not come from the search.
    """
    best = study.best
    if best is None or best.number == study.baseline:
        return {}
    found = {}
    for knob in study.knobs:
        value = best.settings.get(knob.name)
        if isinstance(value, int | float) and (end := _end_of(knob, value)) is not None:
            ends = f"{knob.low:.6g} to {knob.high:.6g}"
            found[knob.name] = f"the best value of `{knob.name}`, {value:.6g}, is at the {end} end of its range, {ends}"
    return found


def _end_of(knob: Knob, value: float) -> str | None:
    """The end of the range, `lower` or `upper`, that a value is at; None if it is at neither."""
    low, high = knob.low, knob.high
    if low is None or high is None or high <= low:
        return None
    if knob.scale == "log":
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    fraction = (value - low) / (high - low)
    return "lower" if fraction <= EDGE_FRACTION else "upper" if fraction >= 1 - EDGE_FRACTION else None


def metric_of(trial: StudyTrial, name: str, objective: str) -> float | None:
    """The value of a metric of a launch; None if unknown. The objective need not be in `metrics`."""
    found = trial.metrics.get(name)
    return trial.value if found is None and name == objective else found


def median_of(launches: Sequence[StudyTrial], name: str, objective: str) -> tuple[float, float, float] | None:
    """Median, minimum and maximum over launches; None if no launch has the metric."""
    values = [value for each in launches if (value := metric_of(each, name, objective)) is not None]
    return (statistics.median(values), min(values), max(values)) if values else None


def paired_change(a: Sequence[StudyTrial], b: Sequence[StudyTrial], name: str, objective: str) -> Interval | None:
    """The ratio of B to A: the geometric mean over common rounds, with its interval; None without a common round."""
    logs = []
    for before, after in _pairs(a, b):
        old, new = metric_of(before, name, objective), metric_of(after, name, objective)
        if old is not None and new is not None and old > 0 and new > 0:
            logs.append(math.log(new / old))
    if not logs:
        return None
    found = mean_interval(np.array(logs))
    return Interval(math.exp(found.value), math.exp(found.lo), math.exp(found.hi))


def _pairs(a: Sequence[StudyTrial], b: Sequence[StudyTrial]) -> list[tuple[StudyTrial, StudyTrial]]:
    """Pairs of launches of the same round; two single launches form one pair."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    rounds = {each.round: each for each in a}
    return [(rounds[each.round], each) for each in b if each.round in rounds]


def setting_text(knob: Knob, trial: StudyTrial) -> str:
    """The value of a setting in a trial as text; for an unset value, the default if it is known."""
    value = trial.settings.get(knob.name)
    if value is None and knob.default is None:
        return knob.unset
    if value is None:
        return f"{_value_text(knob.default)} ({knob.unset})"
    return _value_text(value)


def default_text(knob: Knob, baseline: StudyTrial) -> str:
    """The value of a setting in the launches with the defaults, for a column of defaults."""
    value = knob.value_of(baseline)
    return knob.unset if value is None else _value_text(value)


def _value_text(value: Any) -> str:
    """The value as its flag accepts it, without separators of thousands."""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.6g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
