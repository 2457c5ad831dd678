"""`tgi-bench report`: reports of stored runs, or of a stored comparison."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from loadgen.commands.compare import report_again
from loadgen.commands.present import export_runs, show_runs
from loadgen.commands.shared_flags import add_export_flag
from reports.gate.saved_comparison import COMPARISON_FILE


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="Run directories, or one comparison's directory."
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="Where to write. Default the (first) run directory.")
    parser.add_argument("--json", action="store_true", help="Print summary.json instead of the table.")
    add_export_flag(parser)


def run(args: argparse.Namespace, _words: Sequence[str]) -> int:
    directories: list[Path] = args.directories
    out = args.out or directories[0]
    if len(directories) == 1 and (directories[0] / COMPARISON_FILE).is_file():
        print(report_again(directories[0], out, is_json=args.json))
        return 0
    show_runs(directories, out, is_json=args.json)
    export_runs(directories, args.export)
    return 0
