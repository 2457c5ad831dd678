"""Builds the report of a study from its stored files, without Optuna and without a GPU."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from reports.document import VerdictLine
from reports.metrics.requests.per_request import Direction
from reports.pages.run_pages import PAGE
from reports.pages.study.page import build_study_report
from reports.renderers.write import write_report
from reports.stats.estimators import Interval
from reports.study import Knob, Prediction, StudyData, StudyTrial, TrialOutcome
from reports.text import log_sentence
from tuner.simulator.validate import LEDGER_FILE, read_ledger
from tuner.space.parameter import Parameter
from tuner.study.artefacts import read_verdict, verdict_of
from tuner.study.statistics.judgement import Confirmation
from tuner.study.study_folder import CONFIRM, DRIFT_CHECKS, TRIALS, StudyFolder
from tuner.study.study_search import DECLINED, StudySearch
from tuner.trial.measure import LONGER
from tuner.trial.objective import is_lower_better
from tuner.trial.outcome import TrialResult

# Steps of a trial, with their names in the time line.
PHASES = {"launching": "launch", "warming": "warm", "measuring": "measure", "stopping": "stop"}


def write_study_report(search: StudySearch) -> Path:
    """Write the report to the study's folder. The study can be unfinished."""
    folder = search.folder
    verdict = read_verdict(folder)
    if not verdict:
        unfinished = Confirmation(None, None, {}, "the study is not finished: no configuration is confirmed yet")
        verdict = verdict_of(search, search.results(), unfinished, is_confirmed=False)
    commands = (
        f"tgi-tune run --study {folder.name}",
        f"tgi-tune serve --study {folder.name}",
        f"studies/{folder.name}/reproduce.sh",
    )
    data = study_data(folder, verdict, search.space.parameters, search.server.defaults, commands, _server_of(search))
    return write_report(build_study_report(data), folder).html


def study_data(
    folder: Path,
    verdict: Mapping[str, Any],
    parameters: Sequence[Parameter],
    defaults: Mapping[str, Any],
    commands: Sequence[str] = (),
    server: str = "",
) -> StudyData:
    """The data of a report, from the files of a study.

    commands: commands to continue, serve and reproduce. server: name of the server for the title.
    """
    files = StudyFolder(folder)
    searched = [each for each in files.results(TRIALS) if each.outcome != "failed"]
    drift_checks = [each for each in files.results(DRIFT_CHECKS) if each.outcome != "failed"]
    confirming = files.results(CONFIRM)
    start_s = min((each.started for each in (*searched, *drift_checks, *confirming) if each.started), default=0.0)
    objective = str(verdict["objective"])
    floor = files.noise()
    gain = verdict.get("gain") if verdict.get("gain_of", objective) == objective else None
    trials = (
        *(_trial(each, folder, start_s) for each in searched),
        *(_trial(each, folder, start_s, is_drift_check=True) for each in drift_checks),
        *(_trial(each, folder, start_s, confirms=each.number) for each in confirming),
    )
    return StudyData(
        name=str(verdict["study"]),
        verdict=verdict_line(verdict, files.notes()),
        objective=objective,
        knobs=tuple(report_knob(each, defaults.get(each.name)) for each in parameters),
        trials=trials,
        direction=Direction.LOWER if is_lower_better(objective) else Direction.HIGHER,
        limits=tuple(verdict.get("limits", ())),
        baseline=0 if any(each.number == 0 for each in searched) else None,
        winner=verdict.get("winner"),
        gain=Interval(*gain) if gain is not None and all(value is not None for value in gain) else None,
        compared=verdict.get("compared"),
        limits_kept={int(number): kept for number, kept in verdict.get("limits_kept", {}).items()},
        noise=floor.of(objective) if floor is not None else None,
        is_confirmed=bool(verdict.get("confirmed")),
        predictions=tuple(
            Prediction(each.number, each.how, each.metric, each.predicted, each.measured)
            for each in read_ledger(folder / LEDGER_FILE)
        ),
        facts=_facts(verdict, {**files.notes(), **_longer_runs((*searched, *drift_checks, *confirming))}),
        commands=tuple(commands),
        command=_launch_command(folder),
        load=_load_of(verdict),
        server=server,
    )


def _server_of(search: StudySearch) -> str:
    """The name of the server's program, and of its model without the folder."""
    section = search.config.server
    program = Path(section.profile).stem if section.profile is not None else search.server.build
    return f"{program} with {Path(section.model_id).name}"


def _launch_command(folder: Path) -> str:
    """The command of the best settings, from the exported script without comments; empty without a script."""
    script = next(iter(sorted(folder.glob("run*.sh"), key=lambda path: "docker" in path.name)), None)
    if script is None:
        return ""
    lines = script.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.startswith("#")).removeprefix("exec ")


def _load_of(verdict: Mapping[str, Any]) -> str:
    """The load of a study, from the provenance of its winner, without the digest."""
    facts = parse_qs(str(verdict.get("tuned_by") or "").partition("?")[2])
    return facts.get("load", [""])[0].rpartition(", ")[0]


def verdict_line(verdict: Mapping[str, Any], notes: Mapping[str, Any]) -> VerdictLine:
    """The first sentence of the report, and its reasons."""
    reasons = []
    if verdict.get("quality_guard") not in (None, "on"):
        reasons.append(f"the quality guard is off: {verdict['quality_guard']}")
    if not verdict.get("confirmed"):
        reasons.append("it is not confirmed by fresh launches")
    reasons += [f"`{name}` had no effect: {why}" for name, why in verdict.get("cannot_act", {}).items()]
    reasons += [f"trial {number} was rejected: {why}" for number, why in verdict.get("rejected", {}).items()]
    if DECLINED in notes:
        reasons.append(f"the simulator declined: {notes[DECLINED]}")
    if "drift" in notes:
        reasons.append(str(notes["drift"]))
    if verdict.get("winner") is None:
        word = "No configuration meets the limits" if verdict.get("medians") else "No result"
        return VerdictLine("invalid", word, str(verdict["verdict"]), tuple(reasons))
    if verdict["winner"] == 0:
        return VerdictLine("pass", "Keep the defaults", str(verdict["verdict"]), tuple(reasons))
    if not verdict.get("confirmed"):
        return VerdictLine("inconclusive", "Not confirmed", str(verdict["verdict"]), tuple(reasons))
    return VerdictLine("improvement", "Change the settings", str(verdict["verdict"]), tuple(reasons))


def _trial(
    result: TrialResult, folder: Path, start_s: float, *, confirms: int | None = None, is_drift_check: bool = False
) -> StudyTrial:
    return StudyTrial(
        number=result.number,
        settings=dict(result.settings),
        outcome=_outcome(result),
        value=result.value,
        metrics=dict(result.measured),
        confirms=confirms,
        round=result.attributes.get("round") if confirms is not None else None,
        is_drift_check=is_drift_check,
        missed=tuple(name for name, violation in result.violations.items() if violation > 0),
        phase=result.phase,
        cause=result.cause,
        reason=result.reason,
        log_line=log_sentence(result.log_tail),
        started_s=result.started - start_s if result.started else None,
        spent_s={PHASES[step]: seconds for step, seconds in result.steps.items() if step in PHASES},
        page=_page(result, folder),
    )


def _page(result: TrialResult, folder: Path) -> str:
    """The address of the page of a trial's run, relative to the study; empty without one."""
    if not result.run or not (folder / result.run / PAGE).is_file():
        return ""
    return quote(f"{Path(result.run).as_posix()}/{PAGE}")


def _outcome(result: TrialResult) -> TrialOutcome:
    if result.outcome == "failed":
        return TrialOutcome.FAILED
    if result.value is None:
        return TrialOutcome.NOT_SERVED
    return TrialOutcome.FEASIBLE if result.is_feasible else TrialOutcome.VIOLATED


def report_knob(parameter: Parameter, default: Any) -> Knob:
    """A parameter as the axis of a plot, with the server's default value."""
    scale = "category" if parameter.type in ("bool", "choice") else "log" if parameter.log else "linear"
    ends = (None, None) if scale == "category" else (float(parameter.low), float(parameter.high))
    return Knob(parameter.name, default, scale, low=ends[0], high=ends[1])  # type: ignore[arg-type]


def _longer_runs(results: Iterable[TrialResult]) -> dict[str, str]:
    """The trials whose first run had no steady state, with the length of the run that was measured instead."""
    found = {each.number: each.attributes[LONGER] for each in results if each.attributes.get(LONGER)}
    text = "; ".join(f"trial {number}: {length}" for number, length in found.items())
    return {"longer runs, because the first had no steady state": text} if found else {}


def _facts(verdict: Mapping[str, Any], notes: Mapping[str, Any]) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    rows = [(name, str(verdict[name])) for name in ("build", "device", "load", "quality_guard") if verdict.get(name)]
    rows += [(name, str(value)) for name, value in notes.items()]
    return (("Study", tuple(rows)),) if rows else ()
