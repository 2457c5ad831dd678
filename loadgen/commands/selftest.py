"""`tgi-bench selftest`: the accuracy of this machine's client, and the event rate up to which it is accurate."""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from loadgen.errors import UsageError
from loadgen.program import COULD_NOT_MEASURE
from loadgen.progress import open_progress
from loadgen.selftest import client_check
from loadgen.selftest.client_capacity import Capacity, store_capacity


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--streams", metavar="N,…", default="1,16,64,256", help="Concurrent streams of each load. Default 1,16,64,256."
    )
    parser.add_argument("--seconds", type=float, metavar="S", default=4.0, help="Length of each load. Default 4.")
    parser.add_argument(
        "--only", action="store_true", help="Measure these loads only; do not search for the capacity or store it."
    )
    parser.add_argument("--json", action="store_true", help="Print the measurements as JSON.")


def run(args: argparse.Namespace, _words: Sequence[str]) -> int:
    found = client_check.measure_loads(_streams(args), args.seconds, open_progress(), is_growing=not args.only)
    rate = found.capacity
    if args.json:
        levels = [asdict(level) for level in found.levels]
        values = {"capacity_events_per_s": rate, "conclusion": found.conclusion(), "levels": levels}
        print(json.dumps(values, indent=2))
    else:
        print("\n".join((*(client_check.render(level) for level in found.levels), found.conclusion())))
    if rate is None:
        print("this machine is too busy or too slow to measure from", file=sys.stderr)
        return COULD_NOT_MEASURE
    if not args.only:
        path = store_capacity(Capacity(rate, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")))
        print(f"capacity: {rate:.0f} events/s per worker, stored in {path}", file=sys.stderr)
    return 0


def _streams(args: argparse.Namespace) -> list[int]:
    """Raises UsageError."""
    words = args.streams.split(",")
    if not all(word.isdigit() and 1 <= int(word) <= 10_000 for word in words):
        raise UsageError(f"`streams` is {args.streams!r}, not a list of numbers from 1 to 10000 such as 1,16,64")
    if not 0.5 <= args.seconds <= 600:
        raise UsageError(f"`seconds` is {args.seconds:g} but must be 0.5 to 600")
    return [int(word) for word in words]
