"""Writes the files of a finished study: the verdict, the table of its trials, and the files of the winner."""

import csv
import datetime
import io
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from reports.run_store import replacing
from tuner.errors import SpaceError
from tuner.servers.exported_text import toml_value
from tuner.study.best_file import BEST_FILE, tuned_by, write_best
from tuner.study.identity import BUILD, DEVICE, LOAD
from tuner.study.statistics.judgement import Confirmation
from tuner.study.study_folder import LOAD_FILE, replace_text, write_json
from tuner.study.study_search import StudySearch
from tuner.trial.measure import describe
from tuner.trial.outcome import TrialResult

TRIALS_FILE, PARQUET_FILE = "trials.csv", "trials.parquet"
VERDICT_FILE = "verdict.json"
COLUMNS = 80
"""Width of the table of the trials."""
REPRODUCE = "reproduce.sh"


def write_artefacts(
    search: StudySearch,
    results: Sequence[TrialResult],
    confirmation: Confirmation,
    *,
    is_confirmed: bool,
    guard_off: str | None = None,
) -> dict[str, Any]:
    """Write the study's files and return the verdict. Without a winner, the files of an earlier winner are removed.

    guard_off: the reason why the quality guard is off, if it is.
    """
    verdict = verdict_of(search, results, confirmation, is_confirmed=is_confirmed, guard_off=guard_off)
    folder = search.folder
    table = trials_csv(search, results)
    replace_text(folder / TRIALS_FILE, table)
    _write_parquet(folder / PARQUET_FILE, table)
    write_json(folder / VERDICT_FILE, verdict)
    replace_text(folder / LOAD_FILE, load_toml(search.setup.load, search.folder.name))
    winner = confirmation.winner
    if winner is None:
        for name in (BEST_FILE, REPRODUCE, *search.server.artefacts):
            (folder / name).unlink(missing_ok=True)
        return verdict
    comments = comments_of(verdict)
    write_best(folder / BEST_FILE, {**winner.settings, "tuned_by": verdict["tuned_by"]}, comments)
    artefacts = search.server.artefacts
    refused: dict[str, list[str]] = {}
    for name, form in artefacts.items():
        try:
            replace_text(folder / name, search.server.export(form, winner.settings, comments))
        except SpaceError as error:
            (folder / name).unlink(missing_ok=True)
            refused.setdefault(str(error), []).append(name)
    for reason, names in refused.items():
        search.setup.progress.show(f"not written: {' and '.join(names)}. {reason}")
    script = next(name for name in artefacts if name.startswith("run"))
    replace_text(
        folder / REPRODUCE,
        f'#!/bin/sh\ncd "$(dirname "$0")" && exec tgi-bench run --config load.toml --server "./{script}" "$@"\n',
    )
    for name in (REPRODUCE, *artefacts):
        if name.endswith(".sh") and (folder / name).exists():
            (folder / name).chmod(0o755)
    return verdict


def verdict_of(
    search: StudySearch,
    results: Sequence[TrialResult],
    confirmation: Confirmation,
    *,
    is_confirmed: bool,
    guard_off: str | None = None,
) -> dict[str, Any]:
    """The result of a study as plain values."""
    winner, gain = confirmation.winner, confirmation.gain
    gained = [_finite(gain.value), _finite(gain.lo), _finite(gain.hi)] if gain is not None else None
    identity = search.files.identity()
    is_default = winner is not None and winner.number == 0
    return {
        "study": search.folder.name,
        "verdict": confirmation.sentence,
        "confirmed": is_confirmed,
        "objective": search.objective.maximize,
        "gain_of": search.objective.title,
        "limits": [str(limit) for limit in search.objective.limits],
        "winner": winner.number if winner is not None else None,
        "settings": dict(winner.settings) if winner is not None else None,
        "nearest": confirmation.nearest.number if confirmation.nearest is not None else None,
        "gain": gained,
        "compared": confirmation.compared,
        "limits_kept": {
            str(number): {name: _finite(each) for name, each in kept.items()}
            for number, kept in confirmation.limits.items()
        },
        "medians": {str(number): value for number, value in confirmation.medians.items()},
        "rejected": {str(number): reason for number, reason in confirmation.rejected.items()},
        "cannot_act": dict(search.without_effect),
        "quality_guard": guard_off or "on",
        "load": identity.get(LOAD, "")[:12],
        "build": identity.get(BUILD),
        "device": identity.get(DEVICE),
        "trials": len([result for result in results if result.was_launched]),
        "tuned_by": None
        if winner is None
        else tuned_by(
            search.folder.name,
            winner.number,
            is_confirmed=is_confirmed,
            gain=None if is_default else gained,
            metric=search.objective.title,
            load=describe_load(search),
        ),
    }


def describe_load(search: StudySearch) -> str:
    """A short description of the load, with its digest."""
    return f"{load_text(search.setup.load)}, {search.files.identity().get(LOAD, '')[:12]}"


def load_text(load: BenchConfig) -> str:
    """The mode of a load, its users or rate, its source of prompts, and its lengths.

    >>> load_text(BenchConfig(concurrency=8, input_tokens="64", output_tokens="24"))
    'closed, 8 users, input tokens 64, output tokens 24'
    >>> load_text(BenchConfig(concurrency=1, workload="prompts", prompts_file="examples/copies.jsonl"))
    'closed, 1 user, prompts of copies.jsonl, output tokens default'
    """
    users = "1 user" if load.concurrency == 1 else f"{load.concurrency} users"
    how = users if load.mode == "closed" else f"{load.rate or load.stages} requests/s"
    file = load.prompts_file or load.trace_file
    prompts = f"{load.workload} of {Path(file).name}" if file else f"input tokens {load.input_tokens or 'default'}"
    return f"{load.mode}, {how}, {prompts}, output tokens {load.output_tokens or 'default'}"


def comments_of(verdict: Mapping[str, Any]) -> list[str]:
    """The comment lines of an exported file."""
    limits = "; ".join(verdict["limits"]) or "none"
    now = datetime.datetime.now(datetime.UTC)
    return [
        f"The best configuration of study {verdict['study']}, trial {verdict['winner']}.",
        str(verdict["verdict"]),
        f"Confirmed: {'yes' if verdict['confirmed'] else 'no'}. {now:%Y-%m-%d %H:%M} UTC.",
        f"Limits: {limits}. Load {verdict['load']}, {verdict['build']}, {verdict['device']}.",
        f"tgi-tune serve --study {verdict['study']}",
    ]


def render_table(search: StudySearch, results: Sequence[TrialResult], confirmation: Confirmation) -> str:
    """The verdict, then one line for each trial."""
    verdict = textwrap.fill(confirmation.sentence, COLUMNS)
    lines = [verdict, "", f"{'trial':>5}  {'confirmed':>10}  settings and result"]
    for result in results:
        confirmed = confirmation.medians.get(result.number)
        shown = f"{confirmed:,.1f}" if confirmed is not None else ""
        line = f"{result.number:>5}  {shown:>10}  {changes(search, result)}: {describe(result, search.objective)}"
        lines.append(textwrap.fill(line, COLUMNS, subsequent_indent=19 * " ", break_on_hyphens=False))
    return "\n".join(lines)


def changes(search: StudySearch, result: TrialResult) -> str:
    """The settings of a trial that differ from the baseline's."""
    own = {name: value for name, value in result.settings.items() if search.fixed.get(name) != value}
    return ", ".join(f"{name} {value}" for name, value in own.items()) or "defaults"


def trials_csv(search: StudySearch, results: Sequence[TrialResult]) -> str:
    """One line for each trial: settings, result, violation of each limit, and numbers from the log."""
    names = [parameter.name for parameter in search.space.parameters]
    limits = [str(limit) for limit in search.objective.limits]
    second = [search.objective.second] if search.objective.second is not None else []
    facts = sorted({name for result in results for name in result.attributes.get("facts", {})})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            *("trial", "outcome", search.objective.maximize, *second, *names, *limits),
            *("origin", "phase", "cause", "reason", "seconds", "run"),
            *(f"log_{name}" for name in facts),
        ]
    )
    for result in results:
        writer.writerow(
            [
                *(result.number, result.outcome, result.value, *([result.second] if second else [])),
                *(result.settings.get(name) for name in names),
                *(result.violations.get(limit) for limit in limits),
                *(result.origin, result.phase, result.cause, _not_a_formula(result.reason), result.seconds, result.run),
                *(result.attributes.get("facts", {}).get(name) for name in facts),
            ]
        )
    return text.getvalue()


def load_toml(load: BenchConfig, study: str) -> str:
    """The study's load as a file for `tgi-bench run --config`."""
    values = load.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    left_out = ("model_id", "url", "server", "api_key")
    lines = [f"{name} = {toml_value(value)}" for name, value in values.items() if name not in left_out]
    return "\n".join([f"# The load of study {study}.", *lines]) + "\n"


def _write_parquet(path: Path, table: str) -> None:
    import pandas as pd

    with replacing(path) as file:
        pd.read_csv(io.StringIO(table)).to_parquet(file)


def _not_a_formula(text: str) -> str:
    """The text of a cell, quoted if a spreadsheet would evaluate it as a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def read_verdict(folder: Path) -> dict[str, Any]:
    """The verdict of a study; empty before it is finished."""
    path = folder / VERDICT_FILE
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    return content if isinstance(content, dict) else {}
