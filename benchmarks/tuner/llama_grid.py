"""llama-server over a whole small space, and searches judged on the measured grid.

    python -m benchmarks.tuner.llama_grid --server llama-server --model tiny-llama.gguf --work grid.jsonl --minutes 20
    python -m benchmarks.tuner.llama_grid --replay

The first command launches the server once for each point and pass, in random order within a pass, and measures bursts
of requests on it and the speed of its core during each: benchmarks/tuner/point_bursts.py. It needs a quiet machine. It
stops after `--minutes`, and the next command with the same `--work` continues, so the grid can be measured in parts.
After the passes, the best `--best` points are measured in `--best-passes` more: which point is the best, and which ones
are near it, is decided among them, and the best of many noisy values is too high. `--points 12 --passes 3` measures
only some points and shows the deviation of repeats. By
benchmarks/tuner/modelled_grid.py, a grid can distinguish searches if the deviation is 3 % or less; it falls with the
square root of `--bursts`. The model is made by `python -m benchmarks.peers.gguf_file`.

The rate of a point is its output tokens per second of the server's processor time, or of elapsed time with
`--clock wall`; benchmarks/tuner/grid_values.py computes values from rates. With two or more cores, the servers run on
the first, and the client runs on the others. `--replay` judges searches on the stored grid by the rule in
benchmarks/tuner/grid_search.py.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.http_load import FailedRequest
from benchmarks.tuner import point_bursts
from benchmarks.tuner.core_speed import SpeedProbe, running_probe
from benchmarks.tuner.grid_search import SearchGrid, judge, render_rows
from benchmarks.tuner.grid_values import CLOCKS, PROBES, Key, Row, deviation, powers_of, rates_of, values_of
from benchmarks.tuner.point_bursts import BurstServer, RequestBurst
from loadgen.errors import StartError
from loadgen.target.machine import describe_machine
from loadgen.target.target import Target
from tuner.config import ServerSection
from tuner.servers.launch_command import LaunchCommand
from tuner.servers.select import server_of
from tuner.servers.tuned_server import TunedServer

RESULTS = Path(__file__).parents[1] / "results" / "llama_grid.json"
LEVELS: Mapping[str, Sequence[Any]] = {
    "parallel": (1, 2, 4, 8, 16),
    "ubatch": (8, 16, 32, 128, 512),
    "kv_unified": (False, True),
    "flash_attn": ("off", "on"),
    "cache_type_k": ("f16", "q8_0"),
}
DEFAULTS: Mapping[str, Any] = {
    **{"parallel": 4, "ubatch": 512, "kv_unified": True},
    **{"flash_attn": "on", "cache_type_k": "f16"},
}
# One thread: on two cores, two threads would compete with the client, and its noise would be measured.
FIXED: Mapping[str, Any] = {"threads": 1, "ctx_size": 16384, "cache_ram": 0, "batch": 512}
READY_TIMEOUT_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description="llama-server over a whole space; searches on the measured grid.")
    parser.add_argument("--server", default="llama-server", help="Program of the server.")
    parser.add_argument("--model", help="GGUF file of the model.")
    parser.add_argument("--work", type=Path, help="File of finished measurements.")
    parser.add_argument("--passes", type=int, default=3, help="Measurements of each point, two at least.")
    parser.add_argument("--best", type=int, default=20, help="Points that are measured more often.")
    parser.add_argument("--best-passes", type=int, default=8, help="Further measurements of the best points.")
    parser.add_argument("--points", type=int, help="Measure only N points, the same in each pass; store no grid.")
    parser.add_argument("--bursts", type=int, default=2, help="Bursts of a point in each pass.")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="processor", help="Time of a burst: the server's processor time, or elapsed."
    )
    parser.add_argument("--minutes", type=float, default=50.0, help="Stop after this time.")
    parser.add_argument("--replay", action="store_true", help="Judge searches on the stored grid; launch nothing.")
    parser.add_argument("--seeds", type=int, default=200, help="Searches of each strategy.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.replay:
        if args.model is None or args.work is None:
            parser.error("--model and --work are needed without --replay")
        is_complete = measure_grid(args)
        if args.points is not None or not is_complete:
            return 0
    content = json.loads(args.out.read_text())
    grid = SearchGrid(
        content.get("levels", LEVELS),
        content.get("defaults", DEFAULTS),
        {tuple(row["point"]): row["tokens_per_s"] for row in content["points"]},
    )
    content["replay"] = judge(grid, args.seeds, args.jobs)
    args.out.write_text(_one_line_rows(content))
    print(render_rows(content["replay"]))
    return 0


def measure_grid(args: argparse.Namespace) -> bool:
    """Measure the remaining points until the time is over. Returns whether a grid of two or more passes was written."""
    deadline_s = time.monotonic() + 60 * args.minutes
    points = list(itertools.product(*LEVELS.values()))
    if args.points is not None:
        points = random.Random("points").sample(points, args.points)
    found = _stored(args.work)
    order = _passes(range(args.passes), points)
    _measure_missing(order, found, args, deadline_s)
    if args.points is None and all(key in found for key in order):
        order += _passes(range(args.passes, args.passes + args.best_passes), _best(found, args))
        _measure_missing(order, found, args, deadline_s)
    done = sum(key in found for key in order)
    print(f"{done} of {len(order)} measurements: {_deviations(found, args.clock)}", flush=True)
    turns = [turn for turn in range(args.passes) if all((turn, point) in found for point in points)]
    if args.points is not None:
        return False
    if len(turns) < 2:
        used_s = [row["seconds"] for row in found.values()]
        needed = (2 * len(points) - sum(key[0] < 2 for key in found)) * statistics.fmean(used_s) / 60
        print(f"two passes need about {needed:.0f} more minutes: run the command again", flush=True)
        return False
    args.out.write_text(_one_line_rows(_content(found, turns, args)))
    return True


def _passes(turns: Iterable[int], points: Sequence[tuple[Any, ...]]) -> list[Key]:
    """Every point once in each pass, in another order."""
    return [(turn, point) for turn in turns for point in random.Random(f"pass {turn}").sample(points, len(points))]


def _best(found: Mapping[Key, Row], args: argparse.Namespace) -> list[tuple[Any, ...]]:
    """The points with the highest mean of the passes over all points."""
    means = _means({key: row for key, row in found.items() if key[0] < args.passes}, args.clock)
    return sorted(means, key=lambda point: -means[point])[: args.best]


def _means(found: Mapping[Key, Row], clock: str) -> dict[tuple[Any, ...], float]:
    by_point: dict[tuple[Any, ...], list[float]] = {}
    for (_, point), value in values_of(found, clock).items():
        by_point.setdefault(point, []).append(value)
    return {point: statistics.fmean(values) for point, values in by_point.items()}


def _measure_missing(order: Sequence[Key], found: dict[Key, Row], args: argparse.Namespace, deadline_s: float) -> None:
    left = [key for key in order if key not in found]
    if left:
        _measure(left, found, args, deadline_s)


def _measure(left: Sequence[Key], found: dict[Key, Row], args: argparse.Namespace, deadline_s: float) -> None:
    section = ServerSection(
        profile="llamacpp",
        model_id=args.model,
        fixed=dict(FIXED),
        command=f"{on_first_core(args.server)} --host 127.0.0.1 --port {{port}} --model {{model}} --no-ui",
    )
    server, started = server_of(section), time.monotonic()
    with running_probe(_cores()[0] if _has_own_core() else None) as probe, on_other_cores():
        for number, (turn, point) in enumerate(left, start=1):
            row = measure_point(server, point, turn, probe, args)
            found[turn, point] = row
            with args.work.open("a") as file:
                file.write(json.dumps(row) + "\n")
            used_s = time.monotonic() - started
            if number % 20 == 0 or number == len(left):
                print(f"pass {turn + 1}: {number} of {len(left)} measured, {used_s:.0f} s", flush=True)
            if time.monotonic() + used_s / number > deadline_s:
                return


def on_first_core(command: str) -> str:
    """The command on the first core, if there are others for the client."""
    return f"taskset -c {_cores()[0]} {command}" if _has_own_core() else command


def _has_own_core() -> bool:
    return len(_cores()) > 1 and shutil.which("taskset") is not None


@contextmanager
def on_other_cores() -> Iterator[None]:
    """This process, the client, on all cores but the first."""
    cores = _cores()
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])
    try:
        yield
    finally:
        if len(cores) > 1:
            os.sched_setaffinity(0, cores)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def measure_point(
    server: TunedServer, point: Sequence[Any], turn: int, probe: SpeedProbe, args: argparse.Namespace
) -> dict[str, Any]:
    """Launch the server at a point and measure its bursts. A failed start counts as 0 tokens per second."""
    started, at_s = time.monotonic(), time.time()
    bursts: list[RequestBurst] = []
    with tempfile.TemporaryDirectory(prefix="grid-") as folder:
        launch = _launch(server, dict(zip(LEVELS, point, strict=True)), Path(folder))
        try:
            with launch.target(Path(folder) / "server.log", READY_TIMEOUT_S) as target:
                bursts = point_bursts.measure_bursts(_of(target), probe, args.bursts)
                status = "ok" if all(each.is_whole for each in bursts) else "cut"
        except (StartError, FailedRequest, OSError) as error:
            status = f"failed: {str(error).splitlines()[0][:200]}"
    return {
        **{"pass": turn, "point": list(point), "at": round(at_s, 1), "status": status},
        "bursts": [_stored_burst(each) for each in bursts],
        "seconds": round(time.monotonic() - started, 2),
    }


def _of(target: Target) -> BurstServer:
    return BurstServer(target.url, target.process.pid if target.process is not None else None)


def _stored_burst(burst: RequestBurst) -> dict[str, Any]:
    processor_s = None if burst.processor_s is None else round(burst.processor_s, 5)
    speed = burst.speed
    return {
        **{"tokens": burst.tokens, "wall_s": round(burst.wall_s, 5), "processor_s": processor_s},
        "small_us": None if speed is None else round(speed.small_us, 2),
        "large_us": None if speed is None else round(speed.large_us, 2),
    }


def _launch(server: TunedServer, settings: Mapping[str, Any], folder: Path) -> LaunchCommand:
    return server.launch({**FIXED, **settings, "model_id": server.section.model_id}, folder)


def _deviations(found: Mapping[Key, Row], clock: str) -> str:
    others = [f"{deviation(rates_of(found, each)):.1f} % in {each} time" for each in CLOCKS]
    value = f"{deviation(values_of(found, clock)):.1f} % in {clock} time at equal speed of the core"
    return f"repeats of a point deviate by {', '.join([*others, value])}"


def _stored(work: Path) -> dict[Key, Row]:
    """The finished measurements by pass and point; an incomplete line is ignored."""
    found = {}
    for line in work.read_text().splitlines() if work.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["pass"], tuple(row["point"])] = row
    return found


def _content(found: Mapping[Key, Row], turns: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """The results file: the points with all their complete passes, then the further ones of the best points."""
    values = values_of(found, args.clock)
    turns = [*turns, *sorted({turn for turn, _ in found if turn >= args.passes})]
    rows = [
        {
            "point": list(point),
            "tokens_per_s": [round(values[turn, point], 2) for turn in turns if (turn, point) in values],
        }
        for point in itertools.product(*LEVELS.values())
    ]
    statuses = [str(row["status"]).partition(":")[0] for row in found.values()]
    low, high = point_bursts.INPUT_TOKENS
    return {
        "command": "python -m benchmarks.tuner.llama_grid " + " ".join(sys.argv[1:]),
        "machine": describe_machine(),
        "levels": {name: list(values) for name, values in LEVELS.items()},
        "defaults": dict(DEFAULTS),
        "fixed": dict(FIXED),
        "load": f"bursts of {point_bursts.REQUESTS} requests at once, {low}-{high} tokens in, "
        f"{point_bursts.OUTPUT_TOKENS} out; the median of {args.bursts}",
        "measurements": {name: statuses.count(name) for name in sorted(set(statuses))},
        "value": f"output tokens per second of {args.clock} time, at equal speed of the core",
        "powers": dict(zip(PROBES, (round(each, 3) for each in powers_of(found, args.clock)), strict=True)),
        "deviation": _deviations(found, args.clock),
        "minutes": round(sum(row["seconds"] for row in found.values()) / 60, 1),
        "points": rows,
    }


def _one_line_rows(content: Mapping[str, Any]) -> str:
    """JSON with one line for each point."""
    return "".join(_pieces(content))


def _pieces(content: Mapping[str, Any]) -> Iterator[str]:
    plain = json.dumps({**content, "points": []}, indent=1)
    before, _, after = plain.partition('"points": []')
    yield before + '"points": [\n'
    yield ",\n".join(json.dumps(row) for row in content["points"])
    yield "\n ]" + after + "\n"


if __name__ == "__main__":
    sys.exit(main())
