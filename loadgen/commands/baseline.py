"""`tgi-bench baseline bless|show|list`: runs stored under a name."""

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from loadgen.commands.present import render_table
from loadgen.commands.shared_flags import add_baselines_flag
from loadgen.errors import UsageError
from loadgen.gate.stored_sides import run_directories
from reports.gate.baseline import (
    Baseline,
    BaselineError,
    bless,
    free_path,
    list_baselines,
    load_baseline,
    write_baseline,
)
from reports.gate.comparison import DEFAULT_GATED
from reports.gate.side_run import median_of

GIT_S = 10.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="bless|show|list", required=True)
    blessing = actions.add_parser("bless", help="Store runs under a name.", allow_abbrev=False)
    blessing.add_argument("name", metavar="NAME", help="Letters, digits, dots, dashes and underscores.")
    blessing.add_argument(
        "directories",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="Run directories, or a directory that contains several.",
    )
    blessing.add_argument(
        "--reason", required=True, metavar="TEXT", help="Reason for this baseline, which is stored with it."
    )
    blessing.add_argument("--author", metavar="NAME", help="Name of the author. Default git's user.name.")
    blessing.add_argument("--replace", action="store_true", help="Replace a baseline of that name.")
    show = actions.add_parser("show", help="Show one baseline.", allow_abbrev=False)
    show.add_argument("name", metavar="NAME")
    listing = actions.add_parser("list", help="List the stored baselines.", allow_abbrev=False)
    for each in (blessing, show, listing):
        add_baselines_flag(each)
        each.add_argument("--json", action="store_true", help="Print JSON.")


def run(args: argparse.Namespace, _words: Sequence[str]) -> int:
    try:
        match args.action:
            case "bless":
                print(_bless(args))
            case "show":
                baseline = load_baseline(args.baselines, args.name)
                print(_as_json(baseline) if args.json else _as_text(baseline))
            case _:
                print(_list(args.baselines, is_json=args.json))
    except BaselineError as error:
        raise UsageError(str(error)) from error
    return 0


def _bless(args: argparse.Namespace) -> str:
    directories = run_directories(args.directories)
    free_path(args.baselines, args.name, replaces=args.replace)
    baseline = bless(directories, args.name, args.author or _git_author(), args.reason)
    path = write_baseline(args.baselines, baseline, replaces=args.replace)
    return _as_json(baseline) if args.json else f"{_line(baseline)}\nstored in {path}"


def _list(directory: Path, *, is_json: bool) -> str:
    baselines = list_baselines(directory)
    if is_json:
        return json.dumps([_brief(each) for each in baselines], indent=2)
    return "\n".join(map(_line, baselines)) or f"no baselines in {directory}"


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


def _as_text(baseline: Baseline) -> str:
    rows = [_row(name, [run.metrics.get(name) for run in baseline.runs]) for name in DEFAULT_GATED]
    facts = [
        ("model", baseline.side.get("model")),
        ("commit", baseline.side.get("commit")),
        ("launched", " ".join(baseline.side.get("launch_argv") or ()) or None),
        ("device", baseline.runs[0].device.get("device class")),
        ("load", baseline.load_hash),
    ]
    lines = [f"{name:<9} {value}" for name, value in facts if value]
    return "\n".join([_line(baseline), *lines, "", render_table(pd.DataFrame(rows))])


def _row(name: str, values: Sequence[float | None]) -> dict[str, object]:
    known = [value for value in values if value is not None]
    return {
        "metric": name,
        "median": median_of(known),
        "least": min(known, default=None),
        "most": max(known, default=None),
    }


def _git_author() -> str:
    """Raises UsageError if git has no user.name."""
    try:
        done = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=GIT_S)
        author = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        author = ""
    if not author:
        raise UsageError("git has no user.name; give --author")
    return author
