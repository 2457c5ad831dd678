"""llama-server over a whole small space, and searches judged on the measured grid.

    python -m benchmarks.tuner.llama_grid --server llama-server --model tiny-llama.gguf --work grid.jsonl
    python -m benchmarks.tuner.llama_grid --replay

The first command launches the server once for each point and pass, in random order within a pass, and measures the
output tokens per second of a burst of requests. Finished measurements are kept in `--work`, so that an interrupted
command goes on; it ends with the last pass, or with the last complete pass before `--max-minutes`. A burst that exceeds
its time counts with the answers that were complete. The model is made by `python -m benchmarks.peers.gguf_file`.

`--replay` judges searches on the stored grid: benchmarks/tuner/grid_search.py has the rule. It needs no server.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.http_load import FailedRequest, WavePrompt, stream
from benchmarks.tuner.grid_search import SearchGrid, judge, render_rows
from loadgen.errors import StartError
from loadgen.target.machine import describe_machine
from tuner.config import ServerSection
from tuner.servers.select import server_of
from tuner.servers.tuned_server import TunedServer

RESULTS = Path(__file__).parents[1] / "results" / "llama_grid.json"
LEVELS: Mapping[str, Sequence[Any]] = {
    "parallel": (1, 2, 4, 8, 16),
    "ubatch": (16, 32, 64, 128, 512),
    "kv_unified": (False, True),
    "flash_attn": ("off", "on"),
    "cache_type_k": ("f16", "bf16", "q8_0"),
}
DEFAULTS: Mapping[str, Any] = {
    **{"parallel": 4, "ubatch": 512, "kv_unified": True},
    **{"flash_attn": "on", "cache_type_k": "f16"},
}
# One thread: two spin against the client on two cores, and the noise of the client would be measured.
FIXED: Mapping[str, Any] = {"threads": 1, "ctx_size": 16384, "cache_ram": 0, "batch": 512}
INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS, WARM_REQUESTS = (64, 256), 32, 40, 2
FIRST_TOKEN, LAST_TOKEN = 16, 2047
READY_TIMEOUT_S, WARM_LIMIT_S, BURST_LIMIT_S = 10.0, 1.0, 4.0


def main() -> int:
    parser = argparse.ArgumentParser(description="llama-server over a whole space; searches on the measured grid.")
    parser.add_argument("--server", default="llama-server", help="The program.")
    parser.add_argument("--model", help="The GGUF file.")
    parser.add_argument("--work", type=Path, help="File of finished measurements.")
    parser.add_argument("--passes", type=int, default=3, help="Measurements of each point.")
    parser.add_argument("--points", type=int, help="Measure only the first N points of each pass.")
    parser.add_argument("--max-minutes", type=float, default=40.0, help="Start no pass that would end later.")
    parser.add_argument("--replay", action="store_true", help="Judge searches on the stored grid; launch nothing.")
    parser.add_argument("--seeds", type=int, default=200, help="Searches of each strategy.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.replay:
        if args.model is None or args.work is None:
            parser.error("--model and --work are needed without --replay")
        measure_grid(args)
    content = json.loads(args.out.read_text())
    grid = SearchGrid(LEVELS, DEFAULTS, {tuple(row["point"]): row["tokens_per_s"] for row in content["points"]})
    if args.points is None:
        content["replay"] = judge(grid, args.seeds, args.jobs)
        args.out.write_text(_one_line_rows(content))
        print(render_rows(content["replay"]))
    return 0


def measure_grid(args: argparse.Namespace) -> None:
    """Measure every pass that fits the time, and write the grid."""
    started = time.monotonic()
    section = ServerSection(
        profile="llamacpp",
        model_id=args.model,
        fixed=dict(FIXED),
        command=f"{args.server} --host 127.0.0.1 --port {{port}} --model {{model}} --no-ui",
    )
    server = server_of(section)
    found = _stored(args.work)
    for turn in range(args.passes):
        points = list(itertools.product(*LEVELS.values()))
        random.Random(f"pass {turn}").shuffle(points)
        points = points[: args.points]
        left = [point for point in points if (turn, point) not in found]
        used_s = [row["seconds"] for row in found.values()]
        needed_s = len(left) * statistics.fmean(used_s) if used_s else 0.0
        if turn > 1 and time.monotonic() - started + needed_s > 60 * args.max_minutes:
            print(f"pass {turn + 1} is left out: it needs {needed_s / 60:.0f} more minutes", flush=True)
            break
        for number, point in enumerate(left, start=1):
            row = measure_point(server, point, turn)
            found[turn, point] = row
            with args.work.open("a") as file:
                file.write(json.dumps(row) + "\n")
            if number % 20 == 0 or number == len(left):
                print(f"pass {turn + 1}: {number} of {len(left)}, {time.monotonic() - started:.0f} s", flush=True)
    args.out.write_text(_one_line_rows(_content(found, args.points)))


def measure_point(server: TunedServer, point: Sequence[Any], turn: int) -> dict[str, Any]:
    """Launch the server at a point and measure one burst. A start that fails counts 0 tokens per second."""
    settings = dict(zip(LEVELS, point, strict=True))
    started = time.monotonic()
    rate, status = 0.0, "ok"
    with tempfile.TemporaryDirectory(prefix="grid-") as folder:
        launch = server.launch({**FIXED, **settings, "model_id": server.section.model_id}, Path(folder))
        try:
            with launch.target(Path(folder) / "server.log", READY_TIMEOUT_S) as target:
                rng = random.Random(f"prompts of pass {turn}")
                asyncio.run(_burst(target.url, _prompts(rng, WARM_REQUESTS), WARM_LIMIT_S))
                tokens, seconds, is_whole = asyncio.run(_burst(target.url, _prompts(rng, REQUESTS), BURST_LIMIT_S))
                rate, status = tokens / seconds, "ok" if is_whole else "cut"
        except (StartError, FailedRequest, OSError) as error:
            status = f"failed: {str(error).splitlines()[0][:200]}"
    row = {"pass": turn, "point": list(point), "tokens_per_s": round(rate, 2), "status": status}
    return {**row, "seconds": round(time.monotonic() - started, 2)}


async def _burst(url: str, prompts: Sequence[WavePrompt], limit_s: float) -> tuple[int, float, bool]:
    """Send all prompts at once: tokens of complete answers, seconds until the last of them, and whether all are."""
    started = time.perf_counter()
    calls = [asyncio.create_task(stream(url, "openai", prompt, started)) for prompt in prompts]
    done, late = await asyncio.wait(calls, timeout=limit_s)
    for call in late:
        call.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    answers = [call.result() for call in done]
    seconds = limit_s if late else max(each.last_s for each in answers)
    return sum(each.num_tokens for each in answers), seconds, not late


def _prompts(rng: random.Random, count: int) -> list[WavePrompt]:
    return [
        WavePrompt("", [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(rng.randint(*INPUT_TOKENS))], OUTPUT_TOKENS)
        for _ in range(count)
    ]


def _stored(work: Path) -> dict[tuple[int, tuple[Any, ...]], dict[str, Any]]:
    """The finished measurements by pass and point; a line that was cut off is left out."""
    found = {}
    for line in work.read_text().splitlines() if work.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["pass"], tuple(row["point"])] = row
    return found


def _content(found: Mapping[tuple[int, tuple[Any, ...]], Mapping[str, Any]], limit: int | None) -> dict[str, Any]:
    """The results file: the points with all their complete passes."""
    size = len(list(itertools.product(*LEVELS.values()))) if limit is None else limit
    turns = [turn for turn in range(100) if sum(key[0] == turn for key in found) >= size]
    rows = [
        {"point": list(point), "tokens_per_s": [found[turn, point]["tokens_per_s"] for turn in turns]}
        for point in itertools.product(*LEVELS.values())
        if turns and all((turn, point) in found for turn in turns)
    ]
    statuses = [str(row["status"]).partition(":")[0] for row in found.values()]
    return {
        "command": "python -m benchmarks.tuner.llama_grid " + " ".join(sys.argv[1:]),
        "machine": describe_machine(),
        "levels": {name: list(values) for name, values in LEVELS.items()},
        "fixed": dict(FIXED),
        "load": f"{REQUESTS} requests at once, {INPUT_TOKENS[0]}-{INPUT_TOKENS[1]} tokens in, {OUTPUT_TOKENS} out",
        "measurements": {name: statuses.count(name) for name in sorted(set(statuses))},
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
