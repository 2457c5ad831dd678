"""A study's stored results as the values that its report is made of. Nothing here needs Optuna, a GPU or a network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.document import VerdictLine
from reports.per_request import Direction
from reports.plain_text import log_sentence
from reports.stats import Interval
from reports.study import Knob, Prediction, StudyData, StudyTrial, TrialOutcome
from tuner.objective import is_lower_better
from tuner.outcome import TrialResult
from tuner.resolve import DEFAULTS
from tuner.space import Parameter
from tuner.study_folder import ANCHORS, CONFIRM, TRIALS, StudyFolder
from tuner.validate import LEDGER_FILE, read_ledger

# The steps of a trial as a time line shows them.
PHASES = {"launching": "launch", "warming": "warm", "measuring": "measure", "stopping": "stop"}


def study_data(
    folder: Path, verdict: Mapping[str, Any], parameters: Sequence[Parameter], commands: Sequence[str] = ()
) -> StudyData:
    """The report's input, from the files of a study; it may be under way."""
    files = StudyFolder(folder)
    searched = [each for each in files.results(TRIALS) if each.outcome != "failed"]
    anchors, confirming = files.results(ANCHORS), files.results(CONFIRM)
    begun = min((each.started for each in (*searched, *anchors, *confirming) if each.started), default=0.0)
    objective = str(verdict["objective"])
    floor = files.noise()
    gain = verdict.get("gain")
    trials = (
        *(_trial(each, begun) for each in searched),
        *(_trial(each, begun, is_anchor=True) for each in anchors),
        *(_trial(each, begun, confirms=each.number) for each in confirming),
    )
    return StudyData(
        name=str(verdict["study"]),
        verdict=verdict_line(verdict, files.notes()),
        objective=objective,
        knobs=tuple(report_knob(each) for each in parameters),
        trials=trials,
        direction=Direction.LOWER if is_lower_better(objective) else Direction.HIGHER,
        limits=tuple(verdict.get("limits", ())),
        baseline=0 if any(each.number == 0 for each in searched) else None,
        winner=verdict.get("winner"),
        gain=Interval(*gain) if gain is not None and all(value is not None for value in gain) else None,
        noise=floor.of(objective) if floor is not None else None,
        is_confirmed=bool(verdict.get("confirmed")),
        predictions=tuple(
            Prediction(each.number, each.how, each.metric, each.predicted, each.measured)
            for each in read_ledger(folder / LEDGER_FILE)
        ),
        facts=_facts(verdict, files.notes()),
        commands=tuple(commands),
    )


def verdict_line(verdict: Mapping[str, Any], notes: Mapping[str, Any]) -> VerdictLine:
    """The sentence that opens the report, and what it rests on."""
    reasons = []
    if verdict.get("quality_guard") not in (None, "on"):
        reasons.append(f"the quality guard is off: {verdict['quality_guard']}")
    if not verdict.get("confirmed"):
        reasons.append("no launch has confirmed it")
    reasons += [f"`{name}` could not act: {why}" for name, why in verdict.get("cannot_act", {}).items()]
    reasons += [f"trial {number} was passed over: {why}" for number, why in verdict.get("rejected", {}).items()]
    if "stepped_back" in notes:
        reasons.append(f"the simulator stepped back: {notes['stepped_back']}")
    if "drift" in notes:
        reasons.append(str(notes["drift"]))
    if verdict.get("winner") is None:
        word = "Nothing meets the limits" if verdict.get("medians") else "Nothing to hand over"
        return VerdictLine("invalid", word, str(verdict["verdict"]), tuple(reasons))
    if verdict["winner"] == 0:
        return VerdictLine("pass", "Keep the defaults", str(verdict["verdict"]), tuple(reasons))
    if not verdict.get("confirmed"):
        return VerdictLine("inconclusive", "Not confirmed", str(verdict["verdict"]), tuple(reasons))
    return VerdictLine("improvement", "Change the settings", str(verdict["verdict"]), tuple(reasons))


def _trial(result: TrialResult, begun: float, *, confirms: int | None = None, is_anchor: bool = False) -> StudyTrial:
    return StudyTrial(
        number=result.number,
        settings=dict(result.settings),
        outcome=_outcome(result),
        value=result.value,
        metrics=dict(result.measured),
        confirms=confirms,
        round=result.attributes.get("round") if confirms is not None else None,
        is_anchor=is_anchor,
        missed=tuple(name for name, violation in result.violations.items() if violation > 0),
        phase=result.phase,
        cause=result.cause,
        reason=result.reason,
        log_line=log_sentence(result.log_tail),
        started_s=result.started - begun if result.started else None,
        spent_s={PHASES[step]: seconds for step, seconds in result.steps.items() if step in PHASES},
    )


def _outcome(result: TrialResult) -> TrialOutcome:
    if result.outcome == "failed":
        return TrialOutcome.FAILED
    if result.value is None:
        return TrialOutcome.DEAD
    return TrialOutcome.FEASIBLE if result.is_feasible else TrialOutcome.VIOLATED


def report_knob(parameter: Parameter) -> Knob:
    """A parameter as reports draw it."""
    scale = "category" if parameter.type in ("bool", "choice") else "log" if parameter.log else "linear"
    ends = (None, None) if scale == "category" else (float(parameter.low), float(parameter.high))
    return Knob(parameter.name, DEFAULTS.get(parameter.name), scale, low=ends[0], high=ends[1])  # type: ignore[arg-type]


def _facts(verdict: Mapping[str, Any], notes: Mapping[str, Any]) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    rows = [(name, str(verdict[name])) for name in ("build", "device", "load", "quality_guard") if verdict.get(name)]
    rows += [(name, str(value)) for name, value in notes.items()]
    return (("Study", tuple(rows)),) if rows else ()
