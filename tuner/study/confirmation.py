"""The confirmation: fresh launches of the finalists and the defaults in alternating order decide the study.

The best value of a search is biased because it was chosen as the largest. The value of a fresh launch is not.
"""

import shutil
from collections.abc import Callable, Sequence

from loadgen.terminal.progress_line import LAUNCHING, Position
from tuner.errors import CannotMeasureError
from tuner.study.statistics.judgement import Confirmation, judge
from tuner.study.study_folder import CONFIRM
from tuner.study.study_search import StudySearch
from tuner.trial.measure import Measurer, describe
from tuner.trial.outcome import TrialResult, read_result

# Returns the reason to reject a winner, or None.
Guard = Callable[[TrialResult], str | None]


def confirm(
    search: StudySearch,
    baseline: TrialResult,
    finalists: Sequence[TrialResult],
    rounds: int,
    guard: Guard | None = None,
) -> Confirmation:
    """Launch the defaults and all finalists `rounds` times, in alternating order, and judge.

    Launches with a result in the study's folder are not repeated. If the guard rejects the winner, the next best
    finalist can win.
    """
    configurations = [baseline, *finalists]
    fresh: dict[int, list[TrialResult]] = {each.number: [] for each in configurations}
    measurer = Measurer(search.folder, search.setup.fresh, search.objective, search.evaluate)
    for turn in range(rounds):
        for each in configurations if turn % 2 == 0 else reversed(configurations):
            fresh[each.number].append(_relaunch(search, measurer, each, turn, rounds * len(configurations)))
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


def _relaunch(search: StudySearch, measurer: Measurer, trial: TrialResult, turn: int, count: int) -> TrialResult:
    directory = search.folder / CONFIRM / f"{turn}-{trial.number:04d}"
    known = read_result(directory)
    if known is not None and known.outcome != "failed":
        return known
    shutil.rmtree(directory, ignore_errors=True)
    name = "the defaults" if trial.number == 0 else f"trial {trial.number}"
    search.setup.progress.show(f"confirmation round {turn + 1}: {name}")
    done = len(search.files.results(CONFIRM))
    search.setup.progress.place(Position("confirmation", done + 1, count, idle=LAUNCHING))
    result = measurer.measure(trial.settings, directory, trial.number, "confirm", {"round": turn + 1})
    search.setup.progress.show("  " + describe(result, search.objective))
    if result.outcome == "failed":
        raise CannotMeasureError(result.fault)
    return result
