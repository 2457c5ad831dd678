"""The verdict on confirming launches: the winner, its gain, and the probability that each limit is met. Pure.

A finalist is tested as the best of several (dunnett.py). The probability that a limit is met follows from Student's
distribution of the mean violation over the rounds. From 90 % the limit counts as met, up to 10 % as missed. A winner
must meet every limit. If the defaults miss a limit, a finalist wins without a gain; otherwise the gain decides.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from reports.stats.estimators import Interval
from tuner.study.statistics.dunnett import RoundComparison
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

MET, MISSED = 0.9, 0.1
WIDEST = 4.0
"""An interval of a gain is shown only if its ends differ by at most this factor: a wider one excludes nothing of
interest."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The result of the fresh launches.

    winner: the baseline if no finalist is better; None if no configuration meets every limit. gain: ratio of trial
    `compared` to the defaults, with its 95 % interval. nearest: without a winner, the configuration with the smallest
    violation. By trial number: medians of the objective, reasons of rejected finalists, and in `limits` the probability
    that each limit is met.
    """

    winner: TrialResult | None
    gain: Interval | None
    medians: Mapping[int, float]
    sentence: str
    nearest: TrialResult | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)
    compared: int | None = None
    limits: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


def judge(
    objective: Objective,
    baseline: TrialResult,
    finalists: Sequence[TrialResult],
    fresh: Mapping[int, Sequence[TrialResult]],
    rejected: Mapping[int, str] | None = None,
) -> Confirmation:
    """The verdict on the fresh results of each trial number. `fresh` can include rejected finalists."""
    medians = {number: value for number, runs in fresh.items() if (value := _median(runs, objective)) is not None}
    limits = {number: limit_probabilities(fresh[number]) for number in medians}

    def meets_limits(trial: TrialResult) -> bool:
        return trial.number in medians and all(each >= MET for each in limits[trial.number].values())

    def confirmed(
        winner: TrialResult | None, sentence: str, gain: Interval | None = None, compared: TrialResult | None = None
    ) -> Confirmation:
        measured = [each for each in (baseline, *finalists) if each.number in medians] if winner is None else []
        nearest = min(measured, key=lambda each: _largest_violation(fresh[each.number]), default=None)
        number = compared.number if compared is not None else None
        return Confirmation(winner, gain, medians, sentence, nearest, dict(rejected or {}), number, limits)

    eligible = [each for each in finalists if meets_limits(each)]
    defaults_miss = baseline.number not in medians or any(each <= MISSED for each in limits[baseline.number].values())
    if not eligible:
        if not defaults_miss:
            return confirmed(
                baseline, "keep the defaults: no finalist is shown to meet every limit in its confirming launches"
            )
        if not medians:
            return confirmed(None, "a confirming launch failed for the defaults and for every finalist")
        return confirmed(None, "no configuration is shown to meet every limit")
    if defaults_miss:
        best = max(eligible, key=lambda each: _mean_log(fresh[each.number], objective))
        return confirmed(best, f"trial {best.number} meets every limit and the defaults do not", compared=best)
    numbers = [number for number in medians if number != baseline.number]
    runs = [fresh[baseline.number], *(fresh[number] for number in numbers)]
    comparison = RoundComparison(np.array([_logs(each, objective) for each in runs]).T)
    best = max(eligible, key=lambda each: comparison.gains[numbers.index(each.number)])
    gain = _ratio(comparison.chosen_gain(numbers.index(best.number)))
    change = objective.change(gain)
    gain_text = f"{objective.heading} {_signed(change.value)} %"
    if math.isnan(gain.lo):
        sentence = f"keep the defaults: one round gives no interval for trial {best.number}, {gain_text}"
        return confirmed(baseline, sentence, gain, best)
    if gain.lo <= 1.0 and gain.hi > WIDEST * gain.lo:
        sentence = (
            f"no gain over the defaults is shown: {len(runs[0])} rounds are too few to compare trial {best.number}"
        )
        return confirmed(baseline, f"{sentence}; raise `confirm.rounds`", gain, best)
    gain_text += f" (95 % interval {_signed(change.lo)} to {_signed(change.hi)} %)"
    if gain.lo <= 1.0:
        return confirmed(
            baseline, f"no gain over the defaults is shown: trial {best.number} has {gain_text}", gain, best
        )
    return confirmed(best, f"trial {best.number} is better than the defaults: {gain_text}", gain, best)


def _signed(percent: float) -> str:
    return f"{percent:+.1f}".replace("-", "\N{MINUS SIGN}")


def limit_probabilities(runs: Sequence[TrialResult]) -> dict[str, float]:
    """The probability that each limit is met: that its mean violation is at most 0, by Student's distribution."""
    names = dict.fromkeys(name for run in runs for name in run.violations)
    return {name: _probability_met([run.violations.get(name, 1.0) for run in runs]) for name in names}


def _probability_met(violations: Sequence[float]) -> float:
    """NaN for a single run, because its error is unknown."""
    if len(violations) == 1:
        return math.nan
    mean, error = statistics.fmean(violations), statistics.stdev(violations) / math.sqrt(len(violations))
    if error == 0:
        return 1.0 if mean <= 0 else 0.0
    return float(special.stdtr(len(violations) - 1, -mean / error))


def _median(runs: Sequence[TrialResult], objective: Objective) -> float | None:
    """The median objective; None if a launch failed, because a winner must start reliably."""
    values = [run.value for run in runs if run.value is not None and objective.merit(run.value, run.second) > 0]
    return statistics.median(values) if values and len(values) == len(runs) else None


def _logs(runs: Sequence[TrialResult], objective: Objective) -> list[float]:
    return [math.log(objective.merit(run.value, run.second)) for run in runs]


def _mean_log(runs: Sequence[TrialResult], objective: Objective) -> float:
    return statistics.fmean(_logs(runs, objective))


def _ratio(logs: Interval) -> Interval:
    return Interval(math.exp(logs.value), math.exp(logs.lo), math.exp(logs.hi))


def _largest_violation(runs: Sequence[TrialResult]) -> float:
    names = {name for run in runs for name in run.violations}
    return max((statistics.median(run.violations.get(name, 1.0) for run in runs) for name in names), default=0.0)
