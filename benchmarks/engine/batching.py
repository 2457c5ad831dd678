"""Compare static with continuous batching: the load-test table of the first TGI release, on the bloom-560m shape.

    python -m benchmarks.engine.batching [--model preset:bloom-560m] [--users 16] [--requests 48] [--batch-size 8]
                                  [--rounds 3] [--threads 1] [--json FILE]

Two of our servers run at the same time: `static` finishes a batch before it starts the next one, `continuous` lets
requests join and leave between steps. Each user sends its next request when the last one has ended. Prompts have 64
tokens, output lengths are random between 4 and 64; both servers get the same requests in alternating rounds. Latencies
are of whole requests, over all rounds; RPS is the median of the rounds, with its range.
"""

import argparse
import asyncio
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.engine import in_process
from benchmarks.engine.over_http import machine, prompts
from benchmarks.peers.http_load import WavePrompt, stream
from benchmarks.peers.servers import PeerKind, PeerServer, own_server

PROMPT_TOKENS = 64
NEW_TOKENS = (4, 64)
NEVER = str(10**6)
POLICIES = {
    "static": ["--waiting-served-ratio", NEVER, "--max-waiting-tokens", NEVER, "--prefill-chunking", "false"],
    "continuous": [],
}


@dataclass
class PolicyResult:
    """One policy: latencies from the send to the last token, and requests/s of each round."""

    policy: str
    latencies_s: list[float] = field(default_factory=list)
    rps: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="preset:bloom-560m")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48, help="requests per round, for all users together")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    args = parser.parse_args()
    results = [PolicyResult(policy) for policy in POLICIES]
    with tempfile.TemporaryDirectory() as logs, ExitStack() as running:
        servers = []
        for policy, flags in POLICIES.items():
            command = functools.partial(limited_server, [*flags, "--max-batch-size", str(args.batch_size)])
            peer = PeerKind(policy, "this server", "tgi", command)
            server = PeerServer(peer, args.model, args.threads, prompts(args.model, 1, seed=-1)[0], Path(logs))
            running.callback(server.stop)
            servers.append(server)
        for round_ in range(args.rounds + 1):
            round_prompts = requests(args.model, args.requests, seed=round_)
            for server, result in zip(servers, results, strict=True):
                started = time.perf_counter()
                latencies = asyncio.run(closed_loop(server.url, round_prompts, args.users))
                elapsed = time.perf_counter() - started
                print(f"round {round_} {result.policy}: {len(round_prompts) / elapsed:.2f} requests/s", file=sys.stderr)
                if round_ > 0:
                    result.latencies_s += latencies
                    result.rps.append(len(round_prompts) / elapsed)
    print(f"{machine()}; load average {os.getloadavg()[0]:.1f}; {in_process.DTYPE}, {args.threads} thread(s)")
    print(f"{args.model}, {args.users} users, batches of up to {args.batch_size}")
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


def limited_server(flags: Sequence[str], model: str, threads: int) -> list[str]:
    return [*own_server(model, threads), *flags]


def requests(model: str, count: int, seed: int) -> list[WavePrompt]:
    """The prompts of a round, equal for both servers."""
    rng = random.Random(seed)
    return [
        WavePrompt(prompt.text, prompt.ids[-PROMPT_TOKENS:], rng.randint(*NEW_TOKENS))
        for prompt in prompts(model, count, seed)
    ]


async def closed_loop(url: str, prompts: Sequence[WavePrompt], users: int) -> list[float]:
    """Latencies of all requests in seconds. Raises FailedRequest if a request returns fewer tokens than requested."""
    waiting = list(reversed(prompts))
    latencies = []

    async def user() -> None:
        while waiting:
            started = time.perf_counter()
            await stream(url, "tgi", waiting.pop(), started)
            latencies.append(time.perf_counter() - started)

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return latencies


def table(results: Sequence[PolicyResult]) -> str:
    lines = ["| | avg | min | med | max | p(90) | p(95) | RPS (range of rounds) |", "|---|---|---|---|---|---|---|---|"]
    for result in results:
        values = result.latencies_s
        cuts = statistics.quantiles(values, n=20, method="inclusive")
        seconds = [statistics.mean(values), min(values), statistics.median(values), max(values), cuts[17], cuts[18]]
        cells = " | ".join(f"{value:.2f}s" for value in seconds)
        rps = f"{statistics.median(result.rps):.2f} ({min(result.rps):.2f} - {max(result.rps):.2f})"
        lines.append(f"| {result.policy} (n={len(values)}) | {cells} | {rps} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
