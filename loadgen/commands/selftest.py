"""`tgi-bench selftest`: the accuracy of this machine's client, and the event rate up to which it is accurate.

With `--statistics`: how often the printed intervals contain the true value, in simulated queues.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from loadgen.config.arrival_settings import DEFAULT_WARMUP_S
from loadgen.errors import UsageError
from loadgen.program import COULD_NOT_MEASURE
from loadgen.progress import add_verbosity_flags, progress_of
from loadgen.selftest import certificate_table, client_loads
from loadgen.selftest.certificate import SHORT_RUNS, certify
from loadgen.selftest.client_capacity import StoredCapacity, store_capacity
from loadgen.selftest.trap_check import check_traps, run_own
from loadgen.selftest.trap_judgement import render_result
from loadgen.selftest.trap_rows import select_traps

NOT_KEPT = 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--streams", metavar="N,…", default="1,16,64,256", help="Concurrent streams of each load. Default 1,16,64,256."
    )
    parser.add_argument("--seconds", type=float, metavar="S", default=4.0, help="Length of each load. Default 4.")
    parser.add_argument(
        "--only", action="store_true", help="Measure these loads only; do not search for the capacity or store it."
    )
    parser.add_argument(
        "--traps",
        metavar="N,…",
        nargs="?",
        const="",
        help="Run the trap suite instead: servers that each produce one kind of wrong measurement. All (about 20 "
        "minutes), or some.",
    )
    parser.add_argument("--json", action="store_true", help="Print the measurements as JSON.")
    parser.add_argument(
        "--starved",
        action="store_true",
        help="Stop the generator for half of the time, in turns of 5 ms: times are those of arrival and stay accurate. "
        "The capacity is neither searched nor stored.",
    )
    parser.add_argument(
        "--statistics",
        action="store_true",
        help="Check the printed 95 %% intervals instead of the client: how often they contain the true value, are "
        "withheld, and how wide they are, in simulated queues with fixed seeds. Under two minutes on two free cores.",
    )
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        default=SHORT_RUNS,
        help=f"Simulated runs of each queue, load and number of requests. Default {SHORT_RUNS}.",
    )
    add_verbosity_flags(parser)


def run(args: argparse.Namespace, _words: Sequence[str]) -> int:
    if args.traps is not None and args.statistics:
        raise UsageError("`traps` and `statistics` are two checks; run one after the other")
    if args.traps is not None:
        return _run_traps(args)
    return _check_statistics(args) if args.statistics else _check_client(args)


def _check_statistics(args: argparse.Namespace) -> int:
    if not 10 <= args.runs <= 100_000:
        raise UsageError(f"`runs` is {args.runs} but must be 10 to 100000")
    progress = progress_of(args)
    found = certify(args.runs, done=lambda setting: progress.show(str(setting)))
    content = found.to_json()
    if args.json:
        print(json.dumps(content, indent=2))
    else:
        print(certificate_table.text(content["cells"]))
        print("\nEntries: % of runs that print the interval / coverage in % / median width over the true value.")
        print(f"Seed {found.seed}, {found.runs} runs a cell, warm-up {DEFAULT_WARMUP_S:g} s from an empty queue.")
        print("".join(f"\n{each.cell.name}: {each.promise}" for each in found.findings))
        print(found.conclusion())
    return 0 if found.is_kept else NOT_KEPT


def _check_client(args: argparse.Namespace) -> int:
    is_growing = not (args.only or args.starved)
    found = client_loads.measure_loads(
        _streams(args), args.seconds, progress_of(args), is_growing=is_growing, is_starved=args.starved
    )
    rate = found.capacity
    if args.json:
        levels = [asdict(level) for level in found.levels]
        values = {"capacity_events_per_s": rate, "conclusion": found.conclusion(), "levels": levels}
        print(json.dumps(values, indent=2))
    else:
        print("\n".join((*(client_loads.render(level) for level in found.levels), found.conclusion())))
    if rate is None:
        print("this machine is too busy or too slow to measure from", file=sys.stderr)
        return COULD_NOT_MEASURE
    if is_growing:
        path = store_capacity(StoredCapacity(rate, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")))
        print(f"capacity: {rate:,.0f} events/s per worker, stored in {path}", file=sys.stderr)
    return 0


def _run_traps(args: argparse.Namespace) -> int:
    """Run our own rows of the trap suite; 1 if one fails."""
    traps = select_traps(_numbers(args.traps))
    results = []
    for result in check_traps(traps, run_own):
        results.append(result)
        print(render_result(result), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps([result.to_json() for result in results], indent=2))
    passed = sum(result.passes for result in results)
    print(f"{passed} of {len(results)} traps passed", file=sys.stderr)
    return 0 if passed == len(results) else 1


def _numbers(text: str) -> list[int] | None:
    """The numbers of traps; None: all. Raises UsageError."""
    words = text.split(",") if text else []
    if not all(word.isdigit() for word in words):
        raise UsageError(f"`traps` is {text!r}, not a list of numbers such as 3,5")
    return [int(word) for word in words] or None


def _streams(args: argparse.Namespace) -> list[int]:
    """Raises UsageError."""
    words = args.streams.split(",")
    if not all(word.isdigit() and 1 <= int(word) <= 10_000 for word in words):
        raise UsageError(f"`streams` is {args.streams!r}, not a list of numbers from 1 to 10000 such as 1,16,64")
    if not 0.5 <= args.seconds <= 600:
        raise UsageError(f"`seconds` is {args.seconds:g} but must be 0.5 to 600")
    return [int(word) for word in words]
