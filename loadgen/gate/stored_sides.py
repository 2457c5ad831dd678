"""Sides measured earlier: run directories and named baselines."""

from collections.abc import Sequence
from pathlib import Path

from loadgen.errors import MeasurementError, UsageError
from loadgen.gate.sides import SideSpec
from reports.gate.baseline import BaselineError, load_baseline, metric_names
from reports.gate.history import HistoryError, load_history, occasion_variation
from reports.gate.side_run import SideRun
from reports.gate.stored import UNKNOWN, OccasionVariation
from reports.metrics.summary import Analysis
from reports.run_store import MANIFEST_FILE, RunDirectoryError, load_manifest
from reports.saved_run import load_run


def stored_runs(side: SideSpec, metrics: Sequence[str], baselines: Path) -> tuple[SideRun, ...]:
    """The runs of a stored side, oldest first. Raises UsageError if it does not exist or is not a run."""
    if side.kind == "baseline":
        try:
            return load_baseline(baselines, side.name).side_runs
        except BaselineError as error:
            raise UsageError(str(error)) from error
    directories = run_directories([Path(side.name)])
    return tuple(sorted((side_run(each, metrics, side.label) for each in directories), key=lambda run: run.started_at))


def side_run(directory: Path, metrics: Sequence[str] | None = None, label: str | None = None) -> SideRun:
    """The metrics of a finished run, all of them if `metrics` is None. Raises UsageError."""
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
        raise MeasurementError(f"unknown metric {error}") from error


def run_directories(paths: Sequence[Path]) -> list[Path]:
    """Run directories, and the runs inside other directories. Raises UsageError for one without runs."""
    found: list[Path] = []
    for directory in paths:
        if (directory / MANIFEST_FILE).exists():
            found.append(directory)
            continue
        inside = sorted(path.parent for path in directory.glob(f"*/{MANIFEST_FILE}"))
        if not inside:
            raise UsageError(f"{directory}: not a run directory, and holds no runs")
        found += inside
    return found


def between_of(history: Path, runs: Sequence[SideRun], metrics: Sequence[str]) -> OccasionVariation:
    """The variation of the series of the stored runs between occasions. Raises UsageError for a damaged history."""
    if not runs:
        return UNKNOWN
    try:
        return occasion_variation(load_history(history), runs[0], metrics)
    except HistoryError as error:
        raise UsageError(str(error)) from error
