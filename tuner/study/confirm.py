"""The confirmation: fresh launches of the finalists and the defaults in alternating order. Only these decide.

The best value of a search is biased: it was chosen for being the largest. A fresh launch is not.
"""

import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reports.stats.estimators import Interval, mean_interval
from tuner.errors import CannotMeasureError
from tuner.study.search import StudySearch
from tuner.study.study_folder import CONFIRM
from tuner.trial.measure import Measurer, describe
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult, read_result

# Returns the reason to reject a finalist that won by its numbers, else None.
Guard = Callable[[TrialResult], str | None]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The result of the fresh launches. `gain` is the winner's ratio to the defaults with its 95 % interval.

    `winner` is the baseline if no finalist is better, None if no configuration meets every limit; then `nearest` has
    the smallest violation. `medians` are objective values by trial number; `rejected` are reasons by finalist.
    """

    winner: TrialResult | None
    gain: Interval | None
    medians: Mapping[int, float]
    sentence: str
    nearest: TrialResult | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)


def confirm(
    search: StudySearch,
    baseline: TrialResult,
    finalists: Sequence[TrialResult],
    rounds: int,
    guard: Guard | None = None,
) -> Confirmation:
    """Launch the defaults and all finalists `rounds` times, in alternating order, and judge.

    Launches that exist in the study's folder are not repeated. A winner that the guard rejects is replaced by the
    next best.
    """
    configurations = [baseline, *finalists]
    fresh: dict[int, list[TrialResult]] = {each.number: [] for each in configurations}
    measurer = Measurer(search.folder, search.setup.fresh, search.objective, search.evaluate)
    for turn in range(rounds):
        for each in configurations if turn % 2 == 0 else reversed(configurations):
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
        search.setup.progress.show(f"trial {winner.number} is rejected: {reason}")
        rejected[winner.number] = reason


def judge(
    objective: Objective,
    baseline: TrialResult,
    finalists: Sequence[TrialResult],
    fresh: Mapping[int, Sequence[TrialResult]],
    rejected: Mapping[int, str] | None = None,
) -> Confirmation:
    """The verdict on fresh results by trial number. Pure."""
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
            return confirmed(
                baseline, None, "keep the defaults: no finalist meets every limit in its confirming launches"
            )
        if not medians:
            return confirmed(None, None, "a confirming launch failed for the defaults and for every finalist")
        return confirmed(None, None, "no configuration meets every limit")
    if not baseline_is_able:
        return confirmed(best, None, f"trial {best.number} meets every limit and the defaults do not")
    gain = _paired_gain(fresh[best.number], fresh[baseline.number], objective)
    gain_text = f"{100 * (gain.value - 1):+.1f} % {objective.title}"
    if math.isnan(gain.lo):
        sentence = f"keep the defaults: one round gives no interval for the {gain_text} of trial {best.number}"
        return confirmed(baseline, gain, sentence)
    gain_text += f" (95 % interval {100 * (gain.lo - 1):+.1f} to {100 * (gain.hi - 1):+.1f} %)"
    if gain.lo <= 1.0:
        return confirmed(baseline, gain, f"defaults are as good: trial {best.number} has {gain_text}")
    return confirmed(best, gain, f"trial {best.number} is better than the defaults: {gain_text}")


def _relaunch(search: StudySearch, measurer: Measurer, trial: TrialResult, turn: int) -> TrialResult:
    directory = search.folder / CONFIRM / f"{turn}-{trial.number:04d}"
    known = read_result(directory)
    if known is not None and known.outcome != "failed":
        return known
    shutil.rmtree(directory, ignore_errors=True)
    name = "the defaults" if trial.number == 0 else f"trial {trial.number}"
    search.setup.progress.show(f"confirmation round {turn + 1}: {name}")
    result = measurer.measure(trial.settings, directory, trial.number, "confirm", {"round": turn + 1})
    search.setup.progress.show("  " + describe(result, search.objective))
    if result.outcome == "failed":
        raise CannotMeasureError(result.reason)
    return result


def _median(runs: Sequence[TrialResult]) -> float | None:
    """The median objective; None if any launch failed, because the winner must start reliably."""
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


def _nearest(configurations: Sequence[TrialResult], fresh: Mapping[int, Sequence[TrialResult]]) -> TrialResult | None:
    """The configuration of the smallest violation among those whose launches all survived."""
    alive = [each for each in configurations if _median(fresh.get(each.number, ())) is not None]
    return min(alive, key=lambda each: max(_violations(fresh[each.number]), default=0.0), default=None)


def _paired_gain(runs: Sequence[TrialResult], against: Sequence[TrialResult], objective: Objective) -> Interval:
    pairs = [
        (objective.merit(own.value, own.second), objective.merit(base.value, base.second))
        for own, base in zip(runs, against, strict=True)
    ]
    mean = mean_interval(np.array([math.log(own / base) for own, base in pairs if own and base]))
    return Interval(math.exp(mean.value), math.exp(mean.lo), math.exp(mean.hi))
