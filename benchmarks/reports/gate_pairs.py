"""Measures A/A pairs of the bundled server in interleaved slices, the input of `gate_power`.

    python -m benchmarks.reports.gate_pairs --pairs 40 --slices 4 --state "quiet" --out gate_pairs.json

Each pair launches the same server twice. The file is written after every pair; the same command continues it.
`--factor 1.05` lengthens the model steps of side B (`slowed_step`); side A then also runs in that module, with
factor 1. `--server COMMAND` measures another server, whose responses the relay of `slowed_server` delays instead.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import MeasurementError
from loadgen.gate.interleaving import InterleavedSlices
from loadgen.gate.live_runs import live_measure
from loadgen.gate.sides import CommandServer, LiveSide
from loadgen.generator.forked_load import forked_loads
from loadgen.generator.load_process import StartLoad
from loadgen.progress import SilentProgress
from loadgen.target.launched.launch import split_command
from loadgen.target.machine import describe_machine, library_versions
from loadgen.target.open_target import embedded_command
from reports.gate.side_run import Pair, SideRun
from reports.run_store import write_json

METRICS = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms")
LOAD = Path("docs/ci/gate.toml")
RELAY = Path(__file__).with_name("slowed_server.py")
STEP = [sys.executable, "-m", "benchmarks.reports.slowed_step"]
BUNDLED = shlex.join(embedded_command("preset:tiny-llama")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="Number of pairs in the complete file.")
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--duration", default="2s", help="Measured length of a slice.")
    parser.add_argument("--warmup", default="0.25s")
    parser.add_argument("--server", default=BUNDLED)
    parser.add_argument("--factor", type=float, help="Factor that slows side B; 1.05 is 5 %% slower.")
    parser.add_argument("--state", required=True, help="Description of the machine's state, stored with the result.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    load = parsing.load(BenchConfig, {"duration": args.duration, "warmup": args.warmup}, LOAD)
    content = json.loads(args.out.read_text()) if args.out.exists() else header(args, load)
    with forked_loads() as start_load:
        measure_pairs(args, load, content, start_load)
    return 0


def measure_pairs(args: argparse.Namespace, load: BenchConfig, content: dict[str, Any], start_load: StartLoad) -> None:
    """Add the missing pairs to the file."""
    while len(content["pairs"]) < args.pairs:
        number = len(content["pairs"]) + 1
        with tempfile.TemporaryDirectory() as scratch:
            started, load_average = datetime.now(UTC), os.getloadavg()[0]
            measure = InterleavedSlices(
                args.slices, live_measure(load, METRICS, SilentProgress(), start_load), Path(scratch), SilentProgress()
            )
            try:
                pair = measure(number, sides(args.server, args.factor))
            except MeasurementError as error:
                print(f"pair {number} is measured again: {error}", file=sys.stderr)
                continue
        seconds = (datetime.now(UTC) - started).total_seconds()
        content["pairs"].append(row(pair, started, seconds, load_average))
        write_json(args.out, content)
        print(f"pair {number}: {seconds:.0f} s, load average {load_average:.1f}", file=sys.stderr)


def header(args: argparse.Namespace, load: BenchConfig) -> dict[str, Any]:
    """The file before its first pair. The server's program is named without its directory."""
    program, *arguments = split_command(args.server)
    return {
        "machine": describe_machine(),
        "versions": library_versions(),
        "state": args.state,
        "server": shlex.join([Path(program).name, *arguments]),
        "factor": args.factor,
        "slices": args.slices,
        "load": load.load_description(),
        "pairs": [],
    }


def sides(server: str, factor: float | None) -> tuple[LiveSide, LiveSide]:
    """Both sides: the same server, or one that can slow it, of which B does."""
    words = split_command(server)
    if factor is None:
        both = [words, words]
    elif server == BUNDLED:
        both = [[*STEP, "--factor", f"{each:g}", *words[1:]] for each in (1.0, factor)]
    else:
        both = [[sys.executable, str(RELAY), "--factor", f"{each:g}", *words] for each in (1.0, factor)]
    a, b = (
        LiveSide(letter, letter.upper(), CommandServer(tuple(each))) for letter, each in zip("ab", both, strict=True)
    )
    return a, b


def row(pair: Pair, started: datetime, seconds: float, load_average: float) -> dict[str, Any]:
    """A pair as a row of the file: the slice pairs in order, with the metrics of both sides."""
    return {
        "at": f"{started:%Y-%m-%dT%H:%M:%SZ}",
        "seconds": round(seconds, 1),
        "load_average": load_average,
        "slices": [{"a": _side(each.a), "b": _side(each.b)} for each in pair.slices],
    }


def _side(run: SideRun) -> dict[str, float | None]:
    return {**run.values, "contention": run.contention}


if __name__ == "__main__":
    sys.exit(main())
