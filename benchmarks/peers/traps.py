"""Runs the trap suite with other load generators, and writes the table of docs/comparison.md.

    python -m benchmarks.peers.traps --peers DIR

Each peer has its own environment, given by `--peer NAME=PYTHON` or found as `DIR/NAME/bin/python`. A peer that is not
installed is skipped, with a line on stderr. The result file is written after every row.
"""

import argparse
import datetime
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.peers.trap_peers import PEERS, LoadTool
from loadgen.errors import MeasurementError
from loadgen.selftest.trap_check import HONEST_RUNS, RunCase, check_traps, run_own
from loadgen.selftest.trap_companions import run_tool
from loadgen.selftest.trap_judgement import ToolReport, TrapResult, render_result, shown
from loadgen.selftest.trap_rows import Trap, TrapCase, select_traps
from loadgen.target.machine import describe_machine, product_version
from reports.run_store import write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "traps.json"
PAGE = ROOT / "docs" / "comparison.md"
BEGIN, END = "<!-- results: written by benchmarks/peers/traps.py -->", "<!-- end of results -->"
OWN = "tgi-bench"
# A finding about the short window, and not about the trap.
UNCHECKED = "steady_state_unchecked"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="Interpreter of a peer.")
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help="Directory of environments, each named after its peer."
    )
    parser.add_argument("--traps", metavar="N,…", help="Run only these rows.")
    parser.add_argument("--no-own", action="store_true", help="Run only the peers.")
    parser.add_argument(
        "--honest", action="store_true", help="Also run the honest loads with the peers; takes twice the time."
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="Result file; it is updated.")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="Run this number of rows at a time. Each has its own server; the others only disturb it, so a row that "
        "passes also passes alone. Run a row that fails again alone.",
    )
    parser.add_argument("--page", action="store_true", help="Only write the table of docs/comparison.md.")
    args = parser.parse_args()
    if args.page:
        write_page(json.loads(args.results.read_bytes()))
        return 0
    traps = select_traps(None if args.traps is None else [int(word) for word in args.traps.split(",")])
    for name, python in tools(args).items():
        peer = next((each for each in PEERS if each.name == name), None)
        run = run_own if peer is None else run_peer(peer, python)
        version = product_version() if peer is None else package_version(peer, python)
        is_peer = peer is not None
        check = functools.partial(
            check_traps,
            run=run,
            is_peer=is_peer,
            with_honest=args.honest or not is_peer,
            honest_runs=1 if is_peer else HONEST_RUNS,
        )
        for result in at_once(traps, check, args.at_once):
            print(f"{name}: {render_result(result)}", flush=True)
            store(args.results, name, version, result.to_json())
    return 0


def at_once(
    traps: Sequence[Trap], check: Callable[[Sequence[Trap]], Iterator[TrapResult]], number: int
) -> Iterator[TrapResult]:
    """The results in the order of their ends; `number` rows run at a time."""
    with ThreadPoolExecutor(number) as pool:
        for done in as_completed([pool.submit(lambda trap: list(check([trap])), trap) for trap in traps]):
            yield from done.result()


def tools(args: argparse.Namespace) -> dict[str, str]:
    """Interpreters by tool. A line on stderr names each peer that is not installed."""
    found = {} if args.no_own else {OWN: sys.executable}
    given = dict(word.split("=", 1) for word in args.peer)
    for peer in PEERS:
        default = str(args.peers / peer.name / "bin" / "python") if args.peers is not None else ""
        python = given.get(peer.name, default)
        if python and Path(python).exists():
            found[peer.name] = python
        else:
            print(f"{peer.name} is not installed; skipped", file=sys.stderr)
    return found


def run_peer(peer: LoadTool, python: str) -> RunCase:
    def run(url: str, case: TrapCase, folder: Path) -> ToolReport:
        environment = {**os.environ, **peer.environment(case.load)}
        words = peer.command(python, url, case.load, folder)
        done = run_tool(words, url, case.companion, folder, environment)
        try:
            return peer.read(folder, done.stdout)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MeasurementError(f"no result (exit code {done.returncode}): {done.stdout[-200:].strip()}") from error

    return run


def package_version(peer: LoadTool, python: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({peer.package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def store(path: Path, tool: str, version: str, row: Mapping[str, Any]) -> None:
    """Update one row of one tool in the result file."""
    found = json.loads(path.read_bytes()) if path.exists() else {"tools": {}}
    found["machine"] = {name: describe_machine()[name] for name in ("cpu", "cpus_usable")}
    about = found["tools"].setdefault(tool, {"rows": {}})
    about |= {"version": version, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    about["rows"][str(row["trap"])] = dict(row)
    write_json(path, found)


def table(found: Mapping[str, Any]) -> str:
    """The results as Markdown: a row for each trap, a column for each tool."""
    tools = found["tools"]
    names = [name for name in (OWN, *(peer.name for peer in PEERS)) if name in tools]
    lines = ["| trap | true | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for trap in select_traps(None):
        true = trap.deceptive.true
        cells = [_cell(tools[name]["rows"].get(str(trap.number))) for name in names]
        stated = ", ".join("none" if value is None else shown(value) for value in true.values())
        lines.append(f"| {trap.number} {trap.name} | {stated if len(true) < 3 else 'all'} | {' | '.join(cells)} |")
    scores = []
    for name in names:
        rows = [row for number, row in tools[name]["rows"].items() if number != "0"]
        scores.append(f"{sum(row['passes'] for row in rows)} of {len(rows)}")
    lines.append("| **passed**, of the traps that were run | | " + " | ".join(scores) + " |")
    versions = "; ".join(f"{name} {tools[name]['version']} ({tools[name]['date']})" for name in names)
    return "\n".join([*lines, "", f"Versions and dates: {versions}."])


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not run"
    values = [value for value in row["values"].values() if value is not None]
    number = ", ".join(shown(value) for value in values) if 0 < len(values) < 3 else ""
    findings = ", ".join(name for name in row["findings"] if name != UNCHECKED)
    verdict = findings if row["verdict"] == "valid" else f"{row['verdict']}: {findings}"
    honest = "" if row.get("honest_load", "right") == "right" else f"honest load {row['honest_load']}"
    text = "; ".join(part for part in (number, verdict, honest) if part) or ("right" if row["passes"] else "no number")
    return f"{'✓' if row['passes'] else '✗'} {text}"


def write_page(found: Mapping[str, Any]) -> None:
    """Replace the table of the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
