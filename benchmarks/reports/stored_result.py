"""The command line of a simulated benchmark whose result is stored as JSON: `--runs`, and `--table` to print it."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

Result = Mapping[str, Any]


def run(doc: str | None, runs: int, measure: Callable[[int], Result], render: Callable[[Result], str]) -> int:
    """Write the JSON of `measure(runs)` to stdout; with `--table`, render the JSON from stdin. Returns the exit code.

    runs: default of `--runs`, the number of runs of each row.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=runs, help=f"Number of runs of each row. Default {runs}.")
    parser.add_argument("--table", action="store_true", help="Print the tables of a stored result, read from stdin.")
    args = parser.parse_args()
    if args.table:
        print(render(json.load(sys.stdin)))
        return 0
    json.dump(measure(args.runs), sys.stdout, indent=1)
    print()
    return 0
