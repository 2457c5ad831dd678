"""Runs this load generator and others in turn, with the same load on the same real server.

    python -m benchmarks.peers.same_load --url http://127.0.0.1:8000 --model model --tokenizer MODEL_DIRECTORY \\
        --peer vllm=PYTHON --peer guidellm=PYTHON --out DIR

PYTHON is the interpreter of an environment with the tool. Start the server without a prefix cache (vLLM:
`--no-enable-prefix-caching`; llama-server: `--no-cache-prompt --cache-ram 0`), because the prompts of the tools have
different shared prefixes. Round 0 is the warm-up of the server and not in the table. The time of a run includes the
start of its tool, 5 to 15 s on two cores; each run prints its time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.trap_peers import VLLM_SCRIPT
from reports.text import markdown_table

OWN = "tgi-bench"
LIMIT_S = 1_800


@dataclass(frozen=True, slots=True)
class SameLoad:
    """A closed loop of users on the completions API, with exact lengths."""

    url: str
    model: str
    tokenizer: Path
    users: int
    requests: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Reported:
    """The numbers that a tool reports for one run."""

    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_mean_ms: float
    input_tokens: float
    output_tokens: float
    failed: float


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """A load generator. command: from interpreter, load, folder and seed. read: the result from the folder."""

    name: str
    command: Callable[[str, SameLoad, Path, int], list[str]]
    read: Callable[[Path], Reported]


def _own(python: str, load: SameLoad, folder: Path, seed: int) -> list[str]:
    lengths = ("--input-tokens", str(load.input_tokens), "--output-tokens", str(load.output_tokens))
    return [
        *(python, "-m", "loadgen.cli", "run", "--url", load.url, "--api", "openai-completions", "--model", load.model),
        *("--concurrency", str(load.users), "--requests", str(load.requests), *lengths, "--length-control", "forced"),
        *("--seed", str(seed), "--out", str(folder / "run")),
    ]


def _read_own(folder: Path) -> Reported:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_bytes())
    ttft = found["metrics"]["ttft_s"]["percentiles"]
    return Reported(
        found["rates"]["output_tokens_per_s"]["value"],
        1e3 * ttft["p50"]["value"],
        1e3 * ttft["p95"]["value"],
        1e3 * found["metrics"]["tpot_s"]["mean"],
        *_own_lengths(folder / "run"),
    )


def _own_lengths(run: Path) -> tuple[float, float, float]:
    """Mean input and output tokens of the measured answers, and the number of failed requests."""
    import pandas as pd

    columns = ["phase", "status", "input_tokens", "output_tokens"]
    rows = pd.read_parquet(run / "requests.parquet", columns=columns).query("phase == 'measure'")
    succeeded = rows[rows["status"] == "ok"]
    means = (float(succeeded[name].mean()) for name in ("input_tokens", "output_tokens"))
    return *means, float(len(rows) - len(succeeded))


def _vllm(python: str, load: SameLoad, folder: Path, seed: int) -> list[str]:
    return [
        *(python, "-c", VLLM_SCRIPT, "--backend", "openai", "--base-url", load.url, "--endpoint", "/v1/completions"),
        *("--model", load.model, "--tokenizer", str(load.tokenizer), "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.users), "--seed", str(seed)),
        *("--temperature", "0", "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,95", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "vllm.json"),
    ]


def _read_vllm(folder: Path) -> Reported:
    found: dict[str, Any] = json.loads((folder / "vllm.json").read_bytes())
    completed = max(found["completed"], 1)
    return Reported(
        found["output_throughput"],
        found["p50_ttft_ms"],
        found["p95_ttft_ms"],
        found["mean_tpot_ms"],
        found["total_input_tokens"] / completed,
        found["total_output_tokens"] / completed,
        found["failed"],
    )


def _guidellm(python: str, load: SameLoad, folder: Path, seed: int) -> list[str]:
    backend = f"kind=openai_http,target={load.url},model={load.model},request_format=/v1/completions"
    lengths = f"prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}"
    return [
        *(str(Path(python).with_name("guidellm")), "run", "--backend", backend),
        *("--profile", f"kind=concurrent,streams={load.users}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={load.tokenizer}", "--data", f"kind=synthetic_text,{lengths}"),
        *("--seed", f"kind=static,value={seed}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-console"),
    ]


def _read_guidellm(folder: Path) -> Reported:
    metrics = json.loads((folder / "guidellm.json").read_bytes())["benchmarks"][0]["metrics"]

    def succeeded(name: str) -> dict[str, Any]:
        found: dict[str, Any] = metrics[name]["successful"]
        return found

    ttft = succeeded("time_to_first_token_ms")["percentiles"]
    return Reported(
        succeeded("output_tokens_per_second")["mean"],
        ttft["p50"],
        ttft["p95"],
        succeeded("inter_token_latency_ms")["mean"],
        succeeded("prompt_token_count")["mean"],
        succeeded("output_token_count")["mean"],
        metrics["request_totals"]["errored"],
    )


TOOLS = (
    LoadCommand(OWN, _own, _read_own),
    LoadCommand("vllm", _vllm, _read_vllm),
    LoadCommand("guidellm", _guidellm, _read_guidellm),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run every tool once per round, in rotating order, and print the table. Exit code 1 if a run has no result."""
    args = parse(argv)
    load = SameLoad(
        args.url, args.model, args.tokenizer, args.users, args.requests, args.input_tokens, args.output_tokens
    )
    pythons = {OWN: sys.executable, **dict(word.split("=", 1) for word in args.peer)}
    tools = [tool for tool in TOOLS if tool.name in pythons]
    runs: list[dict[str, Any]] = []
    for number in range(args.rounds + 1):
        first = number % len(tools)
        for tool in (*tools[first:], *tools[:first]):
            folder = args.out / f"{number}-{tool.name}"
            folder.mkdir(parents=True)
            started_s = time.monotonic()
            reported = run_once(tool, pythons[tool.name], load, folder, number)
            runs.append(
                {"round": number, "tool": tool.name, "took_s": time.monotonic() - started_s, **asdict(reported)}
            )
            print(f"round {number}: {tool.name}, {runs[-1]['took_s']:.0f} s", file=sys.stderr)
    (args.out / "runs.json").write_text(json.dumps(runs, indent=2) + "\n")
    print("\n".join(table([run for run in runs if run["round"]])))
    return 0


def run_once(tool: LoadCommand, python: str, load: SameLoad, folder: Path, seed: int) -> Reported:
    """One run of one tool. Raises SystemExit with the end of its log if it has no result."""
    log = folder / "output.log"
    with log.open("wb") as output:
        words = tool.command(python, load, folder, seed)
        done = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=LIMIT_S)
    try:
        return tool.read(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        end = log.read_text(errors="replace")[-500:].strip()
        raise SystemExit(f"{tool.name} has no result (exit code {done.returncode}, {error!r}):\n{end}") from error


COLUMNS = {
    "output_tokens_per_s": "output tokens/s ↑",
    "ttft_p50_ms": "TTFT p50, ms ↓",
    "ttft_p95_ms": "TTFT p95, ms ↓",
    "tpot_mean_ms": "TPOT mean, ms ↓",
    "input_tokens": "prompt tokens",
    "output_tokens": "answer tokens",
    "failed": "failed",
}


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A row per tool: the median over its runs, and their range."""
    rows = []
    for tool in dict.fromkeys(run["tool"] for run in runs):
        own = [run for run in runs if run["tool"] == tool]
        cells = (_with_range([run[name] for run in own]) for name in COLUMNS)
        rows.append((tool, f"{len(own)}", *cells))
    return list(markdown_table(("tool", "runs", *COLUMNS.values()), rows))


def _with_range(values: Sequence[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.4g}" if low == high else f"{middle:.4g} ({low:.4g}–{high:.4g})"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="same_load", description="One load by several load generators, in turn.")
    parser.add_argument("--url", required=True, help="URL of a running server with /v1/completions.")
    parser.add_argument("--model", required=True, help="Name of the model on the server.")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="DIR", help="Tokenizer of the model, for the peers."
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="vllm|guidellm=PYTHON", help="Peer and its Python; repeatable."
    )
    parser.add_argument("--users", type=int, default=8, metavar="N", help="Users of the closed loop. Default 8.")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="Requests per run. Default 200.")
    parser.add_argument("--input-tokens", type=int, default=128, metavar="N", help="Prompt length. Default 128.")
    parser.add_argument("--output-tokens", type=int, default=32, metavar="N", help="Answer length. Default 32.")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="Measured runs per tool. Default 3.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="Folder for the files of the tools.")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
