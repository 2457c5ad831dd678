"""Time of a slice of `tgi-bench compare --interleave` in excess of its length, with new and with forked load processes.

    python -m benchmarks.reports.slice_overhead [--slices 8] [--duration 2s] [--warmup 0.25s] [--json FILE]

One bundled server gets the load of docs/ci/gate.toml in slices, whose load processes are alternately new and forked.
The
table has the wall time of a slice without its duration: its warm-up, start, drain and files; and the time to read its
metrics, which follows the last slice of a pair.
"""

import argparse
import json
import os
import shlex
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.reports.gate_pairs import BUNDLED, LOAD, METRICS
from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.gate.live_runs import live_measure
from loadgen.gate.sides import CommandServer, LiveSide
from loadgen.generator.forked_load import forked_loads
from loadgen.progress import SilentProgress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=8, help="Slices of each kind.")
    parser.add_argument("--duration", default="2s")
    parser.add_argument("--warmup", default="0.25s")
    parser.add_argument("--json", type=Path, help="File to write the times to, as JSON.")
    args = parser.parse_args()
    load = parsing.load(BenchConfig, {"duration": args.duration, "warmup": args.warmup}, LOAD)
    overheads_s = measure(load, args.slices)
    print(
        f"load average {os.getloadavg()[0]:.1f}; seconds of a slice in addition to its {args.duration}, median (range)"
    )
    for name, values in overheads_s.items():
        print(f"{name:<8}{statistics.median(values):>7.2f} ({min(values):.2f} - {max(values):.2f}, n={len(values)})")
    if args.json:
        args.json.write_text(json.dumps({"overhead_s": overheads_s}, indent=1) + "\n")


def measure(load: BenchConfig, slices: int) -> dict[str, list[float]]:
    """Seconds of each slice without its duration, by the kind of its load process, and of the reading of its metrics.

    The first two slices are not counted.
    """
    found: dict[str, list[float]] = {"new": [], "forked": [], "reading": []}
    side = LiveSide("a", "A", CommandServer(tuple(shlex.split(BUNDLED))))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        starts = {"new": None, "forked": stack.enter_context(forked_loads())}
        launching = live_measure(load, METRICS, SilentProgress())
        target = stack.enter_context(launching.launch(side, scratch / "server.log")).target
        for number in range(slices + 1):
            for name, start in starts.items():
                server = live_measure(load, METRICS, SilentProgress(), start).on(side, target)
                started = time.perf_counter()
                read = server.measured(scratch / f"{name}{number}", f"{number}")
                measured = time.perf_counter()
                read()
                if number > 0:
                    found[name].append(measured - started - (load.duration_s or 0.0))
                    found["reading"].append(time.perf_counter() - measured)
    return found


if __name__ == "__main__":
    main()
