"""Compare this server with other servers through HTTP, interleaved in one run.

    python -m benchmarks.engine.over_http [--quick] [--models preset:tiny-llama ...] [--repeats 5]
                                [--concurrency 1 8 32] [--peers ours vllm ...] [--threads 1] [--json FILE]
    python -m benchmarks.engine.over_http --peers ours ours-int8 ours-int4 llama-q8_0 llama-q4_0      quantized weights
    python -m benchmarks.engine.over_http --in-process ...     without router and HTTP: in_process.py

All servers of a model run at the same time; only one has requests while the others are idle. One measurement is a
wave: C distinct prompts of 128 tokens are sent at once, and each streams 64 new tokens with end-of-sequence ignored.
The tokens of every server are counted, and a server with a failed request is dropped. The first round is not counted.
Rates are output tokens/s from the send to the last token, as median and range. TTFT and TPOT are pooled over the
requests of a row; ratios are computed per round, and `ours` is the own server with weights of the same width. `of
floor` is the rate relative to the decode limit of memory bandwidth and compute.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.engine import in_process, roofline
from benchmarks.peers.http_load import FailedRequest, StreamTimes, WavePrompt, run_wave
from benchmarks.peers.servers import PEERS, QUANTIZED_PEERS, PeerKind, PeerServer, SkippedPeer

PROMPT_TOKENS = 128
NEW_TOKENS = 64
DTYPE = "bfloat16"
ALL = (*PEERS, *QUANTIZED_PEERS)
MODELS = ["preset:tiny-llama", "preset:llama-125m", "preset:bloom-560m"]


def main() -> None:
    if "--in-process" in sys.argv:
        sys.argv.remove("--in-process")
        in_process.main()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--peers", nargs="+", choices=[peer.name for peer in ALL], default=[p.name for p in PEERS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of every server")
    parser.add_argument(
        "--quick", action="store_true", help="tiny-llama, C of 1 and 8, three repeats, no vllm, no llama.cpp"
    )
    parser.add_argument("--json", type=Path, help="file to write the measurements to")
    args = parser.parse_args()
    if args.quick:
        args.models, args.concurrency, args.repeats = MODELS[:1], [1, 8], 3
        args.peers = [name for name in args.peers if name not in ("vllm", "llama.cpp")]
    floor = roofline.measure(args.threads)
    print(f"{machine()}; load average {os.getloadavg()[0]:.1f}; {floor}", flush=True)
    peers = [peer for peer in ALL if peer.name in args.peers]
    measured = []
    for model in args.models:
        rows, skipped = measure(model, peers, args.concurrency, args.repeats, args.threads)
        print(table(model, rows, skipped, floor), flush=True)
        measured.append({"model": model, "skipped": skipped, "rows": [row.to_json() for row in rows]})
        if args.json:
            facts = {"machine": machine(), "dtype": DTYPE, "threads": args.threads, "roofline": asdict(floor)}
            facts |= {"at": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}", "load_average": os.getloadavg()}
            args.json.write_text(json.dumps({**facts, "measured": measured}, indent=1) + "\n")


@dataclass
class ServerRow:
    """Results of a server at one concurrency."""

    peer: str
    concurrency: int
    start_s: float
    rates: list[float] = field(default_factory=list)
    streams: list[StreamTimes] = field(default_factory=list)
    outside_forward: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The row with the percentiles of its streams, in ms, instead of the streams."""
        stored = asdict(self)
        del stored["streams"]
        for name, values in (("ttft_ms", [s.first_s * 1e3 for s in self.streams]), ("tpot_ms", self.tpots_ms)):
            stored |= dict(zip((f"{name}_p50", f"{name}_p95"), percentiles(values), strict=True))
        return stored

    @property
    def tpots_ms(self) -> list[float]:
        return [stream.tpot_ms for stream in self.streams]


def measure(
    model: str, peers: Sequence[PeerKind], concurrency: Sequence[int], repeats: int, threads: int
) -> tuple[list[ServerRow], dict[str, str]]:
    """Rows of every server, and the reasons of skipped servers."""
    skipped: dict[str, str] = {}
    rows: dict[tuple[str, int], ServerRow] = {}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as running:
        servers = []
        for peer in peers:
            try:
                server = PeerServer(peer, model, threads, prompts(model, 1, seed=-1)[0], Path(logs))
            except SkippedPeer as reason:
                skipped[peer.name] = str(reason)
                print(f"{model}: {peer.name} is skipped: {reason}", file=sys.stderr)
                continue
            running.callback(server.stop)
            servers.append(server)
            print(f"{model}: {peer.name} started in {server.start_s:.1f} s: {server.facts()}", file=sys.stderr)
        for repeat in range(repeats + 1):
            for count in concurrency:
                for server in list(servers):
                    if server.peer.one_at_a_time and count > 1:
                        continue
                    row = rows.setdefault(
                        (server.peer.name, count), ServerRow(server.peer.name, count, round(server.start_s, 2))
                    )
                    try:
                        run_round(server, row, prompts(model, count, seed=repeat), counted=repeat > 0)
                    except (FailedRequest, TimeoutError, OSError) as error:
                        skipped[server.peer.name] = f"failed at C={count}, round {repeat}: {error!r}"
                        print(f"{model}: {server.peer.name} {skipped[server.peer.name]}", file=sys.stderr)
                        servers.remove(server)
    return [row for row in rows.values() if row.rates], skipped


def run_round(server: PeerServer, row: ServerRow, wave: Sequence[WavePrompt], counted: bool) -> None:
    """Run one wave; add its results to `row` if `counted`."""
    before = server.outside_forward()
    streams = run_wave(server.url, server.peer.dialect, wave)
    after = server.outside_forward()
    if not counted:
        return
    row.rates.append(sum(stream.num_tokens for stream in streams) / max(stream.last_s for stream in streams))
    row.streams.extend(streams)
    row.peak_bytes = server.peak_bytes()
    if before is not None and after is not None:
        row.outside_forward.append(1 - (after[1] - before[1]) / (after[0] - before[0]))
    print(f"  C={row.concurrency} {row.peer}: {row.rates[-1]:.1f} tokens/s", file=sys.stderr)


def prompts(model: str, count: int, seed: int) -> list[WavePrompt]:
    """Distinct prompts, each cut to its last PROMPT_TOKENS tokens."""
    from reference_server.model_server.models import loader
    from reference_server.model_server.options import EngineOptions
    from reference_server.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(loader.locate(EngineOptions(model)).tokenizer_directory)
    # Prompts differ between rounds and between concurrencies.
    texts = in_process.texts(count, seed=random.Random(f"{seed} {count}").getrandbits(32))
    return [WavePrompt(text, tokenizer.encode(text, True)[-PROMPT_TOKENS:], NEW_TOKENS) for text in texts]


def table(model: str, rows: Sequence[ServerRow], skipped: dict[str, str], floor: roofline.Roofline) -> str:
    weights = roofline.weights_a_step(config_of(model))
    by_server = {(row.peer, row.concurrency): row for row in rows}
    rivals = {peer.name: peer.rival for peer in ALL}
    lines = [
        f"\n{model}: {DTYPE}, {floor.threads} thread(s) each, prompt {PROMPT_TOKENS}, output {NEW_TOKENS} forced",
        f"  {'C':<3} {'server':<11}{'tokens/s':>9} {'range':>17} {'n':>2} {'of floor':>8} {'TTFT p50/p95 ms':>16} "
        f"{'TPOT p50/p95 ms':>16} {'outside fwd':>11} {'start s':>7} {'peak GB':>7}  ours/it (range)",
    ]
    for row in sorted(rows, key=lambda row: (row.concurrency, row.peer != "ours")):
        rate = statistics.median(row.rates)
        of_floor = rate / floor.decode_tokens_per_s(weights, row.concurrency, 2)
        outside = f"{statistics.median(row.outside_forward):.0%}" if row.outside_forward else "-"
        ttft, tpot = (
            "/".join(f"{value:.1f}" for value in percentiles(values))
            for values in ([stream.first_s * 1e3 for stream in row.streams], row.tpots_ms)
        )
        lines.append(
            f"  {row.concurrency:<3} {row.peer:<11}{rate:>9.1f} {f'{min(row.rates):.1f} - {max(row.rates):.1f}':>17} "
            f"{len(row.rates):>2} {of_floor:>8.2f} {ttft:>16} {tpot:>16} {outside:>11} {row.start_s:>7.1f} "
            f"{row.peak_bytes / 1e9:>7.2f}  {ratio(by_server.get((rivals[row.peer], row.concurrency)), row)}"
        )
    lines += [f"  skipped: {name}: {reason.splitlines()[0]}" for name, reason in skipped.items()]
    return "\n".join(lines)


def ratio(own: ServerRow | None, row: ServerRow) -> str:
    """Median and range of the ratios of both servers; a ratio per round, because rounds are interleaved."""
    if own is None or row is own or len(own.rates) != len(row.rates):
        return ""
    ratios = [ours / theirs for ours, theirs in zip(own.rates, row.rates, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 95th percentile."""
    cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else [values[0]] * 19
    return cuts[9], cuts[18]


def config_of(model: str) -> dict[str, Any]:
    from reference_server.presets import catalog

    preset = catalog.find(model)
    directory = Path(model) if preset is None else preset.directory
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{in_process.machine()}, {names[0].partition(':')[2].strip() if names else platform.processor()}"


if __name__ == "__main__":
    main()
