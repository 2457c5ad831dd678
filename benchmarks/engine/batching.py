"""Compare static with continuous batching under the load test of TGI's first release, and with its published table.

    python -m benchmarks.engine.batching [--model preset:bloom-560m] [--stages 1m:50,2m:100,1m:0] [--batch-size 32]
                                  [--rounds 1] [--threads 1] [--json FILE]

One of our servers at a time gets the load of `tgi-bench run --profile bloom-k6`: 50, then 100 users in four minutes,
blocking calls, a pause of 1 s. `static` starts the next batch when every request of the current one has ended;
`continuous` lets requests join and leave between steps. Both have the same largest batch, and whole prefills. A round
takes ten minutes; its order alternates. The published table is of BLOOM (176B) on 8 A100s. Here a small model of its
family with random weights runs on a CPU: only the ratio of the two policies can be compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.engine.over_http import machine, prompts
from benchmarks.peers.servers import PeerKind, PeerServer, own_server
from reports.metrics.summary import Analysis
from reports.pages.sections.run_tables import k6_table
from reports.saved_run import load_run

NEVER = str(10**6)
POLICIES = {"static": ["--waiting-served-ratio", NEVER, "--max-waiting-tokens", NEVER], "continuous": []}
WHOLE_PREFILLS = ("--prefill-chunking", "false")
"""With chunks, `--max-batch-size` limits the first batch only."""
COLUMNS = ("avg", "min", "med", "max", "p(90)", "p(95)")


@dataclass(frozen=True, slots=True)
class LoadResult:
    """E2E latencies in seconds by the columns of k6, and requests/s, of one run of one policy.

    requests: those that ended in the window. verdict: of the run.
    """

    policy: str
    round_: int
    latencies_s: dict[str, float]
    rps: float
    requests: int
    failed: int
    verdict: str


def _published(policy: str, latencies_s: Sequence[float], rps: float) -> LoadResult:
    return LoadResult(policy, 0, dict(zip(COLUMNS, latencies_s, strict=True)), rps, 0, 0, "published")


PUBLISHED = (
    _published("static", (8.9, 1.0, 9.12, 16.69, 13.7, 14.26), 5.9),
    _published("continuous", (5.44, 0.95953, 5.28, 13.12, 7.78, 8.92), 9.08),
)
"""README of TGI's first release: "Original code" and "New batching logic"."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="preset:bloom-560m")
    parser.add_argument("--stages", default="1m:50,2m:100,1m:0", help="length and users of each stage")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of the server")
    parser.add_argument("--json", type=Path, help="file to write the measurements to")
    args = parser.parse_args()
    results = []
    for round_ in range(1, args.rounds + 1):
        for policy in POLICIES if round_ % 2 else reversed(POLICIES):
            results.append(measure(policy, round_, args))
            print(f"round {round_} {policy}: {results[-1].rps:.2f} requests/s", file=sys.stderr, flush=True)
    about = f"{machine()}; load average {os.getloadavg()[0]:.1f}; {args.threads} thread(s)"
    print(f"{args.model}, {args.stages}, batches of up to {args.batch_size}; {about}")
    print(table(results))
    if args.json:
        content = {
            "machine": about,
            "settings": {name: str(value) for name, value in vars(args).items() if name != "json"},
            "results": [asdict(each) for each in results],
            "published": [asdict(each) for each in PUBLISHED],
            "ratios": {"here": ratios(results), "published": ratios(PUBLISHED)},
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n")


def measure(policy: str, round_: int, args: argparse.Namespace) -> LoadResult:
    """One run of the load on a new server."""

    def command(model: str, threads: int) -> list[str]:
        limits = ["--max-batch-size", str(args.batch_size), *WHOLE_PREFILLS]
        return [*own_server(model, threads), *limits, *POLICIES[policy]]

    peer = PeerKind(policy, "this server", "tgi", command)
    with tempfile.TemporaryDirectory() as directory:
        server = PeerServer(peer, args.model, args.threads, prompts(args.model, 1, seed=-1)[0], Path(directory))
        try:
            run = Path(directory) / "run"
            flags = ["--profile", "bloom-k6", "--stages", args.stages, "--url", server.url, "--out", str(run)]
            words = [sys.executable, "-m", "loadgen.cli", "run", *flags, "--label", policy]
            subprocess.run(words, check=False, stdout=sys.stderr)
        finally:
            server.stop()
        return result_of(Analysis.of(load_run(run)), policy, round_)


def result_of(analysis: Analysis, policy: str, round_: int) -> LoadResult:
    [row] = k6_table([analysis]).to_dict("records")
    counts = analysis.summary["counts"]
    return LoadResult(
        policy,
        round_,
        {name: float(row[name]) for name in COLUMNS},
        float(row["RPS ↑"]),
        requests=sum(counts.values()),
        failed=sum(count for status, count in counts.items() if status not in ("ok", "abandoned")),
        verdict=str(analysis.summary["verdict"]["status"]),
    )


def ratios(results: Sequence[LoadResult]) -> list[float]:
    """Requests/s of continuous by those of static batching, of each round."""
    rounds = sorted({each.round_ for each in results})
    rps = {(each.policy, each.round_): each.rps for each in results}
    return [rps["continuous", each] / rps["static", each] for each in rounds]


def table(results: Sequence[LoadResult]) -> str:
    """The columns of the published table, a row per run; then the ratios."""
    lines = [f"| | {' | '.join(COLUMNS)} | RPS | failed | run |", f"|---|{'---|' * (len(COLUMNS) + 3)}"]
    for each in (*results, *PUBLISHED):
        cells = " | ".join(f"{each.latencies_s[name]:.2f}s" for name in COLUMNS)
        failed = f"{each.failed} of {each.requests}" if each.requests else ""
        lines.append(f"| {each.policy} | {cells} | {each.rps:.2f} | {failed} | {each.verdict} |")
    found = ratios(results)
    spread = f" ({min(found):.2f} - {max(found):.2f}, {len(found)} rounds)" if len(found) > 1 else " (one round)"
    [published] = ratios(PUBLISHED)
    lines.append(f"continuous / static: {statistics.median(found):.2f} x{spread}; published {published:.2f} x")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
