"""`tgi-bench history`: one line per commit, and the commits at which a metric changed."""

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from loadgen import settings
from loadgen.compare import GITHUB
from loadgen.errors import UsageError
from loadgen.stored_sides import run_directories, side_run
from reports.ci import change_annotations
from reports.compare import DEFAULT_GATED
from reports.history import HistoryError, append_point, find_changes, load_history, point_of
from reports.results import load_manifest


def run(given: argparse.Namespace) -> tuple[str, int]:
    """Returns the text for stdout and the exit code. Raises UsageError."""
    try:
        return (_add(given), 0) if given.word == "add" else _check(given)
    except HistoryError as error:
        raise UsageError(str(error)) from error
    except KeyError as error:
        raise UsageError(f"there is no metric {error}; names are such as ttft_p95_ms or output_tokens_per_s") from error


def _add(given: argparse.Namespace) -> str:
    directories = run_directories(given.directories)
    commit = given.commit or _commit_of(directories[0])
    load_history(given.history)  # a damaged table is not made longer
    point = point_of([side_run(each) for each in directories], commit)
    append_point(given.history, point)
    if given.json:
        return json.dumps(asdict(point), indent=2)
    return f"{commit}: medians of {point.runs} runs on {point.device}, added to {given.history}"


def _commit_of(directory: Path) -> str:
    """The commit a run measured: that of its side, else that of the checkout it was made from. Raises UsageError."""
    manifest = load_manifest(directory)
    commit = manifest.labels.get("commit") or manifest.revision
    if not commit:
        raise UsageError(f"{directory} does not say which commit it measured: give --commit")
    return commit


def _check(given: argparse.Namespace) -> tuple[str, int]:
    points = load_history(given.history)
    if not points:
        raise UsageError(f"{given.history}: there is no history; `tgi-bench history add` begins one")
    changes = find_changes(points, given.metric or DEFAULT_GATED)
    is_worse = any(change.is_worse and change.series == points[-1].series for change in changes)
    exit_code = 1 if given.fail and is_worse else 0
    if given.json:
        return json.dumps([asdict(change) for change in changes], indent=2), exit_code
    counts = Counter(point.series for point in points)
    lines = [f"{len(points)} commits in {len(counts)} series of one device and load each"]
    lines += [change.sentence for change in changes] or ["no metric changed"]
    if settings.environment(*GITHUB).get("GITHUB_ACTIONS") == "true":
        lines.append(change_annotations(changes))
    return "\n".join(lines).rstrip(), exit_code
