"""`tgi-bench history`: one line per commit, and the commits at which a metric changed."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from loadgen.commands.compare import GITHUB
from loadgen.commands.comparison_args import unknown_metric
from loadgen.commands.shared_flags import add_history_flag
from loadgen.config import parsing
from loadgen.errors import UsageError
from loadgen.gate.stored_sides import run_directories, side_run
from reports.gate.comparison import DEFAULT_GATED
from reports.gate.history import HistoryError, append_point, find_changes, load_history, point_of
from reports.pages.ci import change_annotations
from reports.pages.history_page import build_history_report, full_change_sentence
from reports.renderers.write import write_report
from reports.run_store import load_manifest


def add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="add|check", required=True)
    add = actions.add_parser("add", help="Append the medians of runs as one commit's line.", allow_abbrev=False)
    add.add_argument(
        "directories",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="Run directories, or a directory that contains several.",
    )
    add.add_argument("--commit", metavar="ID", help="The measured commit. Default the runs' own commit.")
    check = actions.add_parser("check", help="Find the commits at which a metric changed.", allow_abbrev=False)
    check.add_argument("--metric", action="append", metavar="METRIC", help="Check this metric; repeatable.")
    check.add_argument("--out", type=Path, metavar="DIR", help="Write a report with a figure of each metric.")
    check.add_argument("--fail", action="store_true", help="Exit 1 if a metric became worse in the newest series.")
    for each in (add, check):
        add_history_flag(each)
        each.add_argument("--json", action="store_true", help="Print JSON.")


def run(args: argparse.Namespace, _words: Sequence[str]) -> int:
    try:
        text, exit_code = (_add(args), 0) if args.action == "add" else _check(args)
    except HistoryError as error:
        raise UsageError(str(error)) from error
    except KeyError as error:
        raise unknown_metric(error) from error
    print(text)
    return exit_code


def _add(args: argparse.Namespace) -> str:
    directories = run_directories(args.directories)
    commit = args.commit or _commit_of(directories[0])
    load_history(args.history)  # raises for a damaged table
    point = point_of([side_run(each) for each in directories], commit)
    append_point(args.history, point)
    if args.json:
        return json.dumps(asdict(point), indent=2)
    return f"{commit}: medians of {point.runs} runs on {point.device}, added to {args.history}"


def _commit_of(directory: Path) -> str:
    """The commit of a run's side, else of the checkout it was made from. Raises UsageError if neither is known."""
    manifest = load_manifest(directory)
    commit = manifest.labels.get("commit") or manifest.revision
    if not commit:
        raise UsageError(f"{directory} does not record a commit; give --commit")
    return commit


def _check(args: argparse.Namespace) -> tuple[str, int]:
    points = load_history(args.history)
    if not points:
        raise UsageError(f"{args.history}: no history; `tgi-bench history add` starts one")
    metrics = args.metric or DEFAULT_GATED
    changes = find_changes(points, metrics)
    if args.out is not None:
        report = write_report(build_history_report(args.history.name, points, changes, metrics), args.out)
        print(f"report: {report.html}", file=sys.stderr)
    is_worse = any(change.is_worse and change.series == points[-1].series for change in changes)
    exit_code = 1 if args.fail and is_worse else 0
    if args.json:
        return json.dumps([asdict(change) for change in changes], indent=2), exit_code
    counts = Counter(point.series for point in points)
    lines = [f"{len(points)} commits in {len(counts)} series of one device and load each"]
    lines += [full_change_sentence(change) for change in changes] or ["no metric changed"]
    if parsing.environment(*GITHUB).get("GITHUB_ACTIONS") == "true":
        lines.append(change_annotations(changes))
    return "\n".join(lines).rstrip(), exit_code
