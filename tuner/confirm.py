"""The confirmation: the finalists and the defaults launched again in turns. Only these fresh numbers decide.

A search's best value carries the luck that made it the best; a relaunch does not.
"""

import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reports.stats import Interval, mean_interval
from tuner.errors import CannotMeasureError
from tuner.measure import Measurer, describe
from tuner.objective import Objective
from tuner.outcome import TrialResult, read_result
from tuner.search import Search
from tuner.study_folder import CONFIRM

# Says what speaks against a finalist that has won by its numbers; None where nothing does.
Guard = Callable[[TrialResult], str | None]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What the fresh launches say. `gain` is the winner's over the defaults as a factor, with its 95 % interval.

    `winner` is the baseline where no finalist is shown to be better, None where nothing meets every limit; then
    `nearest` is the one that misses least. `medians` are of the objective, by trial number; `rejected` are finalists
    that something else speaks against.
    """

    winner: TrialResult | None
    gain: Interval | None
    medians: Mapping[int, float]
    sentence: str
    nearest: TrialResult | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)


def confirm(
    search: Search, baseline: TrialResult, finalists: Sequence[TrialResult], rounds: int, guard: Guard | None = None
) -> Confirmation:
    """Relaunch everyone `rounds` times, each round in the reverse order of the one before, and judge.

    Rounds that the study's folder holds already are not run again. A winner that the guard speaks against is passed
    over for the next.
    """
    everyone = [baseline, *finalists]
    fresh: dict[int, list[TrialResult]] = {each.number: [] for each in everyone}
    measurer = Measurer(search.folder, search.bench.fresh, search.objective, search.evaluate)
    for turn in range(rounds):
        for each in everyone if turn % 2 == 0 else reversed(everyone):
            fresh[each.number].append(_relaunch(search, measurer, each, turn))
    rejected: dict[int, str] = {}
    while True:
        left = [each for each in finalists if each.number not in rejected]
        found = judge(search.objective, baseline, left, fresh, rejected)
        winner = found.winner
        if winner is None or winner.number == baseline.number or guard is None:
            return found
        reason = guard(winner)
        if reason is None:
            return found
        search.bench.progress.say(f"trial {winner.number} is passed over: {reason}")
        rejected[winner.number] = reason


def judge(
    objective: Objective,
    baseline: TrialResult,
    finalists: Sequence[TrialResult],
    fresh: Mapping[int, Sequence[TrialResult]],
    rejected: Mapping[int, str] | None = None,
) -> Confirmation:
    """The verdict on fresh results by trial number; pure."""
    rejected = dict(rejected or {})
    medians = {number: value for number, runs in fresh.items() if (value := _median(runs)) is not None}
    merits = {number: _merit(fresh[number], objective) for number in medians}

    def confirmed(winner: TrialResult | None, gain: Interval | None, sentence: str) -> Confirmation:
        nearest = _nearest([baseline, *finalists], fresh) if winner is None else None
        return Confirmation(winner, gain, medians, sentence, nearest, rejected)

    able = [each for each in finalists if each.number in medians and _meets_limits(fresh[each.number])]
    best = max(able, key=lambda each: merits[each.number], default=None)
    baseline_is_able = baseline.number in medians and _meets_limits(fresh[baseline.number])
    if best is None:
        if baseline_is_able:
            return confirmed(baseline, None, "no finalist survived its confirmation: keep the defaults")
        if not medians:
            return confirmed(None, None, "the confirming launches died: those of the defaults and of every finalist")
        return confirmed(None, None, "no configuration meets every limit")
    if not baseline_is_able:
        return confirmed(best, None, f"trial {best.number} meets every limit and the defaults do not")
    gain = _paired_gain(fresh[best.number], fresh[baseline.number], objective)
    shown = f"{100 * (gain.value - 1):+.1f} % {objective.title}"
    if math.isnan(gain.lo):
        sentence = f"keep the defaults: one round cannot show that the {shown} of trial {best.number} are real"
        return confirmed(baseline, gain, sentence)
    shown += f" (95 % interval {100 * (gain.lo - 1):+.1f} to {100 * (gain.hi - 1):+.1f} %)"
    if gain.lo <= 1.0:
        return confirmed(baseline, gain, f"defaults are as good: trial {best.number} has {shown}")
    return confirmed(best, gain, f"trial {best.number} is better than the defaults: {shown}")


def _relaunch(search: Search, measurer: Measurer, trial: TrialResult, turn: int) -> TrialResult:
    directory = search.folder / CONFIRM / f"{turn}-{trial.number:04d}"
    known = read_result(directory)
    if known is not None and known.outcome != "failed":
        return known
    shutil.rmtree(directory, ignore_errors=True)
    name = "the defaults" if trial.number == 0 else f"trial {trial.number}"
    search.bench.progress.say(f"confirming, round {turn + 1}: {name}")
    result = measurer.measure(trial.settings, directory, trial.number, "confirm", {"round": turn + 1})
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


def _merit(runs: Sequence[TrialResult], objective: Objective) -> float:
    return statistics.median(objective.merit(run.value, run.second) for run in runs)


def _meets_limits(runs: Sequence[TrialResult]) -> bool:
    return all(violation <= 0 for violation in _violations(runs))


def _violations(runs: Sequence[TrialResult]) -> list[float]:
    limits = {name for run in runs for name in run.violations}
    return [statistics.median(run.violations.get(name, 1.0) for run in runs) for name in limits]


def _nearest(everyone: Sequence[TrialResult], fresh: Mapping[int, Sequence[TrialResult]]) -> TrialResult | None:
    """Who misses its limits by the least, among those that did not die."""
    alive = [each for each in everyone if _median(fresh.get(each.number, ())) is not None]
    return min(alive, key=lambda each: max(_violations(fresh[each.number]), default=0.0), default=None)


def _paired_gain(runs: Sequence[TrialResult], against: Sequence[TrialResult], objective: Objective) -> Interval:
    pairs = [
        (objective.merit(mine.value, mine.second), objective.merit(theirs.value, theirs.second))
        for mine, theirs in zip(runs, against, strict=True)
    ]
    mean = mean_interval(np.array([math.log(mine / theirs) for mine, theirs in pairs if mine and theirs]))
    return Interval(math.exp(mean.value), math.exp(mean.lo), math.exp(mean.hi))
