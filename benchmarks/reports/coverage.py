"""The long form of `tgi-bench selftest --statistics`: 1,000 runs of each queue, load and number of requests.

Prints the conclusion, and one JSON object with the machine, the versions and every cell. docs/intervals.md has the
table.

    python benchmarks/reports/coverage.py > benchmarks/results/coverage.json
    python benchmarks/reports/coverage.py --table < benchmarks/results/coverage.json
"""

import argparse
import json
import sys
import time

from loadgen.selftest import certificate_table
from loadgen.selftest.certificate import LONG_RUNS, SEED, certify
from loadgen.target import machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=LONG_RUNS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--table", action="store_true", help="print the table of a stored result, read from stdin, as Markdown"
    )
    args = parser.parse_args()
    if args.table:
        print(certificate_table.markdown(json.load(sys.stdin)["cells"]))
        return 0
    began_s = time.perf_counter()
    found = certify(args.runs, args.seed, args.processes, lambda setting: print(setting, file=sys.stderr))
    where = {"machine": machine.describe_machine(), "libraries": machine.library_versions()}
    print(json.dumps({**found.to_json(), "wall_s": round(time.perf_counter() - began_s), **where}, indent=1))
    print(found.conclusion(), file=sys.stderr)
    return 0 if found.is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
