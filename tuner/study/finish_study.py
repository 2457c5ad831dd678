"""Finishes a study: corrects drift, chooses and confirms finalists, writes the artefacts and the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.simulator.fitting.cost_file import COST_FILE
from tuner.simulator.validate import compare_predictions, traced_launches, write_costs
from tuner.study.artefacts import render_table, write_artefacts
from tuner.study.confirmation import confirm
from tuner.study.statistics.drift_check import drift_of
from tuner.study.statistics.judgement import Confirmation
from tuner.study.study_folder import DRIFT_CHECKS
from tuner.study.study_report import write_study_report
from tuner.study.study_search import StudySearch
from tuner.trial.outcome import TrialResult
from tuner.trial.quality import QualityGuard


@dataclass(frozen=True, slots=True)
class FinishedStudy:
    """The results of a study: the verdict as plain values, a table of the trials as text, the path of the report."""

    verdict: dict[str, Any]
    table: str
    report: Path


def finish(search: StudySearch, results: Sequence[TrialResult]) -> FinishedStudy:
    """Confirm the finalists and write the study's files. Raises CannotMeasureError."""
    baseline = next(result for result in results if result.number == 0)
    section = search.config.confirm
    drift = drift_of(search.files.results(DRIFT_CHECKS), search.files.noise(), search.objective)
    if drift is not None and drift.is_real:
        search.files.note("drift", str(drift))
    corrected = drift.corrected(results) if drift is not None else results
    finalists = search.finalists(corrected)[: section.finalists]
    guard = QualityGuard(search.config.quality, search.setup, baseline, search.folder / "quality")
    is_confirmed = bool(section.rounds and finalists)
    if is_confirmed:
        confirmation = confirm(search, baseline, finalists, section.rounds, guard)
    else:
        confirmation = _unconfirmed(search, [*finalists[:1], baseline])
    verdict = write_artefacts(
        search,
        results,
        confirmation,
        is_confirmed=is_confirmed and confirmation.winner is not None,
        guard_off=guard.why_off,
    )
    launches = traced_launches(search.folder, results, search.setup.load)
    compare_predictions(search.folder, results, launches, search.setup.load)
    write_costs(search.folder / COST_FILE, launches)
    return FinishedStudy(verdict, render_table(search, results, confirmation), write_study_report(search))


def _unconfirmed(search: StudySearch, candidates: Sequence[TrialResult]) -> Confirmation:
    feasible = [each for each in candidates if each.is_feasible]
    winner = max(feasible, key=lambda each: search.objective.merit(each.value, each.second), default=None)
    sentence = f"trial {winner.number} measured best" if winner else "no configuration meets every limit"
    return Confirmation(winner, None, {}, f"unconfirmed: {sentence}")
