"""The confirmation: the finalists and the defaults launched again in turns. Only these fresh numbers decide.

A search's best value carries the luck that made it the best; a relaunch does not.
"""

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reports.stats import Interval, mean_interval
from tuner.errors import CannotMeasureError
from tuner.outcome import TrialResult, read_result
from tuner.search import Search, describe

CONFIRM = "confirm"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What the fresh launches say. `gain` is the winner's over the defaults as a factor, with its 95 % interval.

    `winner` is the baseline where no finalist is shown to be better, None where nothing meets every limit.
    """

    winner: TrialResult | None
    gain: Interval | None
    medians: Mapping[int, float]
    sentence: str


def confirm(search: Search, baseline: TrialResult, finalists: Sequence[TrialResult], rounds: int) -> Confirmation:
    """Relaunch everyone `rounds` times, each round in the reverse order of the one before, and judge.

    Rounds that the study's folder holds already are not run again.
    """
    everyone = [baseline, *finalists]
    fresh: dict[int, list[TrialResult]] = {each.number: [] for each in everyone}
    for turn in range(rounds):
        for each in everyone if turn % 2 == 0 else reversed(everyone):
            fresh[each.number].append(_relaunch(search, each, turn))
    return judge(search.objective.maximize, baseline, finalists, fresh)


def judge(
    metric: str,
    baseline: TrialResult,
    finalists: Sequence[TrialResult],
    fresh: Mapping[int, Sequence[TrialResult]],
) -> Confirmation:
    """The verdict on fresh results by trial number; pure."""
    medians = {number: value for number, runs in fresh.items() if (value := _median(runs)) is not None}
    able = [each for each in finalists if each.number in medians and _meets_limits(fresh[each.number])]
    best = max(able, key=lambda each: medians[each.number], default=None)
    baseline_is_able = baseline.number in medians and _meets_limits(fresh[baseline.number])
    if best is None:
        if baseline_is_able:
            return Confirmation(baseline, None, medians, "no finalist survived its confirmation: keep the defaults")
        return Confirmation(None, None, medians, "no configuration meets every limit")
    if not baseline_is_able:
        sentence = f"trial {best.number} meets every limit and the defaults do not"
        return Confirmation(best, None, medians, sentence)
    gain = _paired_gain(fresh[best.number], fresh[baseline.number])
    shown = f"{100 * (gain.value - 1):+.1f} % {metric}"
    if math.isnan(gain.lo):
        sentence = f"keep the defaults: one round cannot show that the {shown} of trial {best.number} are real"
        return Confirmation(baseline, gain, medians, sentence)
    shown += f" (95 % interval {100 * (gain.lo - 1):+.1f} to {100 * (gain.hi - 1):+.1f} %)"
    if gain.lo <= 1.0:
        return Confirmation(baseline, gain, medians, f"defaults are as good: trial {best.number} has {shown}")
    return Confirmation(best, gain, medians, f"trial {best.number} is better than the defaults: {shown}")


def _relaunch(search: Search, trial: TrialResult, turn: int) -> TrialResult:
    directory = search.folder / CONFIRM / f"{turn}-{trial.number:04d}"
    known = read_result(directory)
    if known is not None and known.outcome != "failed":
        return known
    shutil.rmtree(directory, ignore_errors=True)
    name = "the defaults" if trial.number == 0 else f"trial {trial.number}"
    search.bench.progress.say(f"confirming, round {turn + 1}: {name}")
    result = search.measure(trial.settings, directory, trial.number)
    search.bench.progress.say("  " + describe(result, search.objective))
    if result.outcome == "failed":
        raise CannotMeasureError(result.reason)
    return result


def _median(runs: Sequence[TrialResult]) -> float | None:
    """None where any launch died: a configuration that fails now and then is no answer."""
    values = [run.value for run in runs]
    if not values or any(value is None for value in values):
        return None
    return statistics.median(value for value in values if value is not None)


def _meets_limits(runs: Sequence[TrialResult]) -> bool:
    limits = {name for run in runs for name in run.violations}
    return all(statistics.median(run.violations.get(name, 1.0) for run in runs) <= 0 for name in limits)


def _paired_gain(runs: Sequence[TrialResult], against: Sequence[TrialResult]) -> Interval:
    logs = [
        math.log(mine.value / theirs.value)
        for mine, theirs in zip(runs, against, strict=True)
        if mine.value and theirs.value
    ]
    mean = mean_interval(np.array(logs))
    return Interval(math.exp(mean.value), math.exp(mean.lo), math.exp(mean.hi))
