"""`tgi-bench report`: reports of stored runs, of a stored comparison, or the index of a folder of results."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from loadgen.commands.present import export_runs, show_runs
from loadgen.commands.shared_flags import add_export_flag
from loadgen.commands.stored_comparison import report_again
from loadgen.errors import UsageError
from reports.pages.index.page import build_index, results_json
from reports.pages.index.saved_results import saved_results
from reports.pages.run_pages import SERIES, write_pages_below
from reports.renderers.write import write_page
from reports.run_store import MANIFEST_FILE, RunDirectoryError

INDEX_FILE = "index.html"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="Run directories; one folder of many results, whose index.html is written; or one comparison's directory.",
    )
    parser.add_argument(
        "--runs",
        action="store_true",
        help="Write the page of each run below a sweep, search, comparison, noise measurement or study.",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="Folder of the report. Default the (first) directory.")
    parser.add_argument("--json", action="store_true", help="Print summary.json, or the index as JSON, not the table.")
    add_export_flag(parser)


def run(args: argparse.Namespace, _words: Sequence[str]) -> int:
    directories: list[Path] = args.directories
    first, out = directories[0], args.out or directories[0]
    series = next((kind for name, kind in SERIES.items() if (first / name).is_file()), None)
    if args.runs:
        _pages_of_runs(directories, series)
    if len(directories) == 1 and series == "comparison":
        print(report_again(first, out, is_json=args.json))
    elif len(directories) == 1 and series is not None:
        if not args.runs:
            raise UsageError(
                f"{first} is a {series}: its report is written with it; --runs writes the pages of its runs"
            )
    elif len(directories) == 1 and first.is_dir() and not (first / MANIFEST_FILE).is_file():
        _index(first, out, is_json=args.json)
    else:
        show_runs(directories, out, is_json=args.json)
        export_runs(directories, args.export)
    return 0


def _pages_of_runs(directories: Sequence[Path], series: str | None) -> None:
    """Write the page of each run below a series. Raises UsageError for another directory."""
    if len(directories) > 1 or series is None:
        raise UsageError(
            f"`runs` is set but {directories[0]} is no sweep, search, comparison, noise measurement or study; "
            "give one such directory"
        )
    for page in write_pages_below(directories[0]):
        print(f"report: {page}", file=sys.stderr)


def _index(directory: Path, out: Path, *, is_json: bool) -> None:
    """Write the index of a folder. Raises UsageError for a folder without any result."""
    results = saved_results(directory)
    if not any(each.kind != "unknown" for each in results):
        raise UsageError(f"{directory}: not a run directory, it has no {MANIFEST_FILE}, and no folder below it is one")
    out.mkdir(parents=True, exist_ok=True)
    try:
        page = write_page(build_index(directory, results, out), out / INDEX_FILE)
    except RunDirectoryError as error:
        raise UsageError(str(error)) from error
    if is_json:
        print(json.dumps(results_json(directory, results), indent=2, allow_nan=False))
    else:
        broken = sum(bool(each.problem) for each in results)
        print(f"{len(results) - broken:,} results" + (f", {broken:,} folders not read" if broken else ""))
    print(f"index: {page}", file=sys.stderr)
