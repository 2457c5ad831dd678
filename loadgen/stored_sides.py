"""Sides that were measured earlier: run directories, and named baselines with the command that keeps them."""

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from loadgen.errors import MeasurementError, UsageError
from loadgen.present import render_table
from loadgen.sides import SideText
from reports.baseline import Baseline, BaselineError, bless, list_baselines, load_baseline, write_baseline
from reports.compare import DEFAULT_GATED, SideRun, median_of
from reports.history import HistoryError, between_occasions, load_history
from reports.results import MANIFEST_FILE, RunDirectoryError, load_manifest, load_run
from reports.stored import UNKNOWN, BetweenOccasions
from reports.summary import Analysis

GIT_S = 10.0


def stored_runs(side: SideText, metrics: Sequence[str], baselines: Path) -> tuple[SideRun, ...]:
    """The runs of a stored side, oldest first. Raises UsageError for what is not there or is no run."""
    if side.kind == "baseline":
        try:
            return load_baseline(baselines, side.name).side_runs
        except BaselineError as error:
            raise UsageError(str(error)) from error
    directories = run_directories([Path(side.name)])
    return tuple(sorted((side_run(each, metrics, side.label) for each in directories), key=lambda run: run.started_at))


def side_run(directory: Path, metrics: Sequence[str] | None = None, label: str | None = None) -> SideRun:
    """A finished run as the gate sees it, with every metric it has where none are named. Raises UsageError."""
    from reports.baseline import metric_names

    try:
        manifest = load_manifest(directory)
        summary = Analysis.of(load_run(directory)).summary
    except RunDirectoryError as error:
        raise UsageError(str(error)) from error
    if label is not None:
        manifest.label = label
    try:
        return SideRun.of(manifest, summary, metrics if metrics is not None else metric_names(summary), directory)
    except KeyError as error:
        raise MeasurementError(f"there is no metric {error}") from error


def run_directories(given: Sequence[Path]) -> list[Path]:
    """Run directories, and the runs in directories that hold several. Raises UsageError where there is none."""
    found: list[Path] = []
    for directory in given:
        if (directory / MANIFEST_FILE).exists():
            found.append(directory)
            continue
        inside = sorted(path.parent for path in directory.glob(f"*/{MANIFEST_FILE}"))
        if not inside:
            raise UsageError(f"{directory}: neither a run directory nor one that holds runs")
        found += inside
    return found


def between_of(history: Path, runs: Sequence[SideRun], metrics: Sequence[str]) -> BetweenOccasions:
    """What history says of the series that stored runs belong to. Raises UsageError for a damaged history."""
    if not runs:
        return UNKNOWN
    try:
        return between_occasions(load_history(history), runs[0], metrics)
    except HistoryError as error:
        raise UsageError(str(error)) from error


def run_baseline(given: argparse.Namespace) -> str:
    """`baseline bless|show|list`; returns the text for stdout. Raises UsageError."""
    try:
        match given.word:
            case "bless":
                baseline = bless(
                    run_directories(given.directories), given.name, given.author or _git_author(), given.reason
                )
                path = write_baseline(given.baselines, baseline, replaces=given.replace)
                return _as_json(baseline) if given.json else f"{_line(baseline)}\nstored in {path}"
            case "show":
                baseline = load_baseline(given.baselines, given.name)
                return _as_json(baseline) if given.json else _shown(baseline)
            case _:
                listed = list_baselines(given.baselines)
                if given.json:
                    return json.dumps([_brief(each) for each in listed], indent=2)
                return "\n".join(map(_line, listed)) or f"{given.baselines} holds no baselines"
    except BaselineError as error:
        raise UsageError(str(error)) from error


def _as_json(baseline: Baseline) -> str:
    return json.dumps(baseline.model_dump(mode="json"), indent=2, allow_nan=False)


def _brief(baseline: Baseline) -> dict[str, object]:
    return {
        "name": baseline.name,
        "author": baseline.author,
        "reason": baseline.reason,
        "blessed_at": baseline.blessed_at,
        "runs": len(baseline.runs),
    }


def _line(baseline: Baseline) -> str:
    return (
        f"{baseline.name}: {len(baseline.runs)} runs, blessed {baseline.blessed_at} by {baseline.author}: "
        f"{baseline.reason}"
    )


def _shown(baseline: Baseline) -> str:
    rows = [_row(name, [run.metrics.get(name) for run in baseline.runs]) for name in DEFAULT_GATED]
    facts = [
        ("model", baseline.side.get("model")),
        ("commit", baseline.side.get("commit")),
        ("launched", " ".join(baseline.side.get("launch_argv") or ()) or None),
        ("device", baseline.runs[0].device.get("device class")),
        ("load", baseline.load_hash),
    ]
    told = [f"{name:<9} {value}" for name, value in facts if value]
    return "\n".join([_line(baseline), *told, "", render_table(pd.DataFrame(rows))])


def _row(name: str, values: Sequence[float | None]) -> dict[str, object]:
    known = [value for value in values if value is not None]
    return {
        "metric": name,
        "median": median_of(known),
        "least": min(known, default=None),
        "most": max(known, default=None),
    }


def _git_author() -> str:
    """Raises UsageError where git does not know who this is."""
    try:
        done = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=GIT_S)
        author = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        author = ""
    if not author:
        raise UsageError("a baseline names who blessed it: give --author")
    return author
