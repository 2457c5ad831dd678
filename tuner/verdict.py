"""What a study leaves for people and programs: the table, `trials.csv`, `verdict.json` and `best.toml`."""

import csv
import datetime
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.confirm import Confirmation
from tuner.export import BEST_FILE, write_best
from tuner.outcome import TrialResult
from tuner.search import Search, describe

TRIALS_FILE = "trials.csv"
VERDICT_FILE = "verdict.json"


def write_artefacts(
    search: Search, results: Sequence[TrialResult], confirmation: Confirmation, *, is_confirmed: bool
) -> dict[str, Any]:
    """Write the study's files and return the verdict. Without a winner there is no `best.toml`."""
    verdict = verdict_of(search, results, confirmation, is_confirmed=is_confirmed)
    _replace(search.folder / TRIALS_FILE, trials_csv(search, results))
    _replace(search.folder / VERDICT_FILE, json.dumps(verdict, indent=2) + "\n")
    if confirmation.winner is not None:
        write_best(
            search.folder / BEST_FILE, *_best(search, confirmation, confirmation.winner, is_confirmed=is_confirmed)
        )
    else:
        (search.folder / BEST_FILE).unlink(missing_ok=True)
    return verdict


def verdict_of(
    search: Search, results: Sequence[TrialResult], confirmation: Confirmation, *, is_confirmed: bool
) -> dict[str, Any]:
    """The study's end as plain values."""
    winner, gain = confirmation.winner, confirmation.gain
    return {
        "study": search.folder.name,
        "verdict": confirmation.sentence,
        "confirmed": is_confirmed,
        "objective": search.objective.maximize,
        "limits": [str(limit) for limit in search.objective.limits],
        "winner": winner.number if winner is not None else None,
        "settings": dict(winner.settings) if winner is not None else None,
        "gain": [_finite(gain.value), _finite(gain.lo), _finite(gain.hi)] if gain is not None else None,
        "medians": {str(number): value for number, value in confirmation.medians.items()},
        "cannot_act": list(search.cannot_act),
        "trials": len([result for result in results if result.outcome != "failed"]),
    }


def render_table(search: Search, results: Sequence[TrialResult], confirmation: Confirmation) -> str:
    """The verdict, then one line a trial."""
    lines = [confirmation.sentence, "", f"{'trial':>5}  {'confirmed':>10}  settings and result"]
    for result in results:
        confirmed = confirmation.medians.get(result.number)
        shown = f"{confirmed:,.1f}" if confirmed is not None else ""
        lines.append(
            f"{result.number:>5}  {shown:>10}  {changes(search, result)}: {describe(result, search.objective)}"
        )
    return "\n".join(lines)


def changes(search: Search, result: TrialResult) -> str:
    """What a trial sets that the baseline does not."""
    own = {name: value for name, value in result.settings.items() if search.fixed.get(name) != value}
    return ", ".join(f"{name} {value}" for name, value in own.items()) or "defaults"


def trials_csv(search: Search, results: Sequence[TrialResult]) -> str:
    """Every trial, a line each: its searched settings, what it came to, and how far it misses each limit."""
    names = [parameter.name for parameter in search.space.parameters]
    limits = [str(limit) for limit in search.objective.limits]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["trial", "outcome", search.objective.maximize, *names, *limits, "phase", "cause", "reason", "seconds", "run"]
    )
    for result in results:
        searched: Mapping[str, Any] = result.settings
        writer.writerow(
            [
                result.number,
                result.outcome,
                result.value,
                *(searched.get(name) for name in names),
                *(result.violations.get(limit) for limit in limits),
                result.phase,
                result.cause,
                result.reason,
                result.seconds,
                result.run,
            ]
        )
    return text.getvalue()


def _best(
    search: Search, confirmation: Confirmation, winner: TrialResult, *, is_confirmed: bool
) -> tuple[dict[str, Any], list[str]]:
    origin = f"{search.folder.name}/{winner.number}" + ("/confirmed" if is_confirmed else "")
    comments = [
        f"The best configuration of study {search.folder.name}, trial {winner.number}.",
        confirmation.sentence,
        f"Confirmed: {'yes' if is_confirmed else 'no'}. {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC.",
        "text-generation-launcher --config-file best.toml",
    ]
    return {**winner.settings, "tuned_by": origin}, comments


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
