"""Calibrates the simulator only from client timings, and compares its predictions with held-out loads.

    python -m benchmarks.tuner.outside_twin --llama-server llama-server --model tiny-llama.gguf --out DIR

Two servers, one after the other: the bundled server, without its step traces, and llama-server. Each is launched,
calibrated with `tgi-tune simulate calibrate --url`, and validated with `simulate validate --url`. The table has the
median errors over the held-out loads, each predicted before it was measured. On a quiet machine of two cores it takes
about five minutes per server; `--servers own` needs no llama-server. Exit code 1 if an error is above its limit.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.target.launched.launch import find_launcher
from loadgen.target.launched.launched_target import LaunchedTarget
from loadgen.target.machine import describe_machine
from reports.text import markdown_table
from tuner import cli
from tuner.commands.simulation.simulate_outside import ACCURATE

RESULTS = Path(__file__).parents[1] / "results" / "outside_twin.json"
READY_TIMEOUT_S = 600.0
"""The first start of the bundled server compiles kernels."""
TITLES = {
    "output_tokens_per_s": "output tokens/s",
    "tpot_mean_ms": "TPOT mean",
    "ttft_p95_ms": "TTFT p95",
}


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each server. Both compute with one thread and cache no prompts."""
    # The context has some tokens more, because the lengths of a load may not include special tokens.
    slots, tokens = args.slots, args.slots * (args.max_total_tokens + 64)
    llama = [
        *(args.llama_server, "--host", "127.0.0.1", "--port", "{port}", "--model", str(args.model), "--no-ui"),
        *("--threads", "1", "--parallel", str(slots), "--ctx-size", str(tokens), "--batch-size", "512"),
        *("--no-cache-prompt", "--cache-ram", "0"),
    ]
    own = [
        *(find_launcher(), "--model-id", args.own_model, "--port", "{port}", "--compute-threads", "1"),
        *("--max-total-tokens", str(args.max_total_tokens), "--max-input-tokens", str(args.max_total_tokens - 1)),
        *("--prefix-caching", "false", "--max-concurrent-requests", "1024"),
    ]
    return {name: command for name, command in (("own", own), ("llama.cpp", llama)) if name in args.servers}


def main() -> int:
    args = parse()
    found = {}
    for name, command in commands(args).items():
        started = time.monotonic()
        found[name] = measure(name, command, args) | {"minutes": round((time.monotonic() - started) / 60, 1)}
        print("\n".join(table(found)), flush=True)
    content = {"command": "python -m benchmarks.tuner.outside_twin " + " ".join(sys.argv[1:])}
    content |= {"machine": describe_machine(), "users": args.users, "servers": found}
    args.result.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(each["accurate"][name] for each in found.values() for name in ACCURATE) else 1


def measure(name: str, command: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Launch, calibrate and validate one server: its rule, the error of each metric, and every held-out load."""
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    cost = folder / "cost.json"
    with LaunchedTarget(command, folder / "server.log", ready_timeout_s=READY_TIMEOUT_S) as target:
        words = ["--url", target.url, "--users", str(args.users), "--max-total-tokens", str(args.max_total_tokens)]
        started = time.monotonic()
        calibrated = simulate("calibrate", *words, "--output", str(cost), "--out", str(folder / "calibration"))
        calibration_s = time.monotonic() - started
        repeats = ["--repeats", str(args.repeats)]
        found = simulate("validate", *words, "--cost", str(cost), "--out", str(folder / "held-out"), *repeats)
    return {
        "command": [Path(command[0]).name, *command[1:]],
        "rule": calibrated["servers"][0]["options"],
        "calibration_s": round(calibration_s),
        **{key: found[key] for key in ("errors", "accurate", "loads")},
    }


def simulate(action: str, *words: str) -> dict[str, Any]:
    """The JSON of a `tgi-tune simulate` command. Raises SystemExit if it failed."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = cli.main(["simulate", action, *words, "--json"])
    try:
        found: dict[str, Any] = json.loads(output.getvalue())
    except ValueError as error:
        raise SystemExit(f"tgi-tune simulate {action} ended with code {code} and no result") from error
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A row for each server and metric."""
    rows = [
        (
            server,
            TITLES[name],
            f"{each['errors'][name]['median']:.1%}",
            f"{each['errors'][name]['p90']:.1%}",
            f"{limit:.0%}",
            "yes" if each["accurate"][name] else "no",
            f"{len(each['loads'])}",
        )
        for server, each in found.items()
        for name, limit in ACCURATE.items()
    ]
    return list(markdown_table(("server", "metric", "median error", "p90", "limit", "within", "loads"), rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Calibrate servers from outside, and validate the predictions.")
    parser.add_argument("--servers", nargs="+", choices=("own", "llama.cpp"), default=("own", "llama.cpp"))
    parser.add_argument("--llama-server", default="llama-server", metavar="PROGRAM")
    parser.add_argument("--model", type=Path, metavar="FILE", help="The GGUF file of llama-server.")
    parser.add_argument("--own-model", default="preset:tiny-llama", metavar="ID")
    parser.add_argument("--users", type=int, default=8, metavar="N", help="Largest concurrency. Default 8.")
    parser.add_argument("--slots", type=int, default=6, metavar="N", help="Slots of llama-server. Default 6.")
    parser.add_argument("--max-total-tokens", type=int, default=512, metavar="N", help="Default 512.")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="Runs of a held-out load. Default 3.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Folder of the runs. Default temporary.")
    parser.add_argument("--result", type=Path, default=RESULTS)
    args = parser.parse_args()
    if "llama.cpp" in args.servers and args.model is None:
        parser.error("--model is needed for llama.cpp")
    args.out = args.out or Path(tempfile.mkdtemp(prefix="outside-twin-"))
    return args


if __name__ == "__main__":
    sys.exit(main())
