"""What the load generator costs per token event, and how far its times are from the truth.

A server in a process of its own writes every token at a known moment. Prints, per load, the worker's CPU time per
event, its loop lag, and the error of TTFT and gaps; `--json` for one object with machine and versions.

    python benchmarks/client.py
    python benchmarks/client.py --streams 8,64,256 --gap-ms 20 --seconds 10
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loadgen import machine
from loadgen.config import BenchConfig
from loadgen.runner import run
from loadgen.target import Target
from reports.results import RunResult

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
INFO = {"model_id": "truth", "max_input_tokens": 100_000, "max_total_tokens": 100_000}


def chunk(payload: dict[str, Any]) -> bytes:
    data = b"data:" + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n" % len(data) + data + b"\r\n"


def event(index: int, total: int) -> bytes:
    is_last = index == total
    details = {"finish_reason": "length", "generated_tokens": total, "seed": None, "input_length": 9}
    token = {"id": 1234, "text": " token", "logprob": -0.123456, "special": False}
    text = "done" if is_last else None
    return chunk({"index": index, "token": token, "generated_text": text, "details": details if is_last else None})


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first_s: float, gap_s: float) -> None:
    """Serve one connection: `/info`, `/tokenize` (a token a word) and streams whose every token is due at a time."""
    loop = asyncio.get_running_loop()
    while head := await reader.readuntil(b"\r\n\r\n"):
        arrived_s = loop.time()
        path = head.split(b" ", 2)[1]
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        if path == b"/generate_stream":
            total = body["parameters"]["max_new_tokens"]
            writer.write(HEAD)
            for index in range(1, total + 1):
                await asyncio.sleep(arrived_s + first_s + (index - 1) * gap_s - loop.time())
                if writer.is_closing():
                    raise ConnectionResetError
                writer.write(event(index, total))
            writer.write(b"0\r\n\r\n")
            continue
        value: Any = INFO if path == b"/info" else body.get("inputs", "").split() if path == b"/tokenize" else None
        content = json.dumps(value).encode() if value is not None else b""
        status = b"200 OK" if value is not None else b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(content)) + content)


def serve(listener: socket.socket, first_s: float, gap_s: float) -> None:
    """The truth server's process."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer, first_s, gap_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connected, sock=listener, limit=2**20)
        await server.serve_forever()

    asyncio.run(main())


def measure(streams: int, first_s: float, gap_s: float, seconds: float, tokens: int) -> dict[str, Any]:
    """One load of so many streams at once."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4_096)
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listener, first_s, gap_s), daemon=True)
    server.start()
    config = BenchConfig(
        concurrency=streams, duration=seconds, warmup=1, drain=0.2, input_tokens="32", output_tokens=str(tokens)
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            result = run(config, Target(url), Path(folder) / "run")
    finally:
        server.terminate()
        server.join()
        listener.close()
    return describe(result, streams, first_s, gap_s)


def describe(result: RunResult, streams: int, first_s: float, gap_s: float) -> dict[str, Any]:
    measured = [record for record in result.records if record.phase == "measure" and record.status == "ok"]
    gaps = sorted(gap / 1e9 - gap_s for record in measured for gap in record.gap_ns)
    ttfts = sorted(
        (record.t_first_ns - record.t_sent_ns) / 1e9 - first_s
        for record in measured
        if record.t_first_ns and record.t_sent_ns
    )
    (worker,) = result.client["workers"]
    elapsed_s = max(row["t_s"] for row in result.timeseries)
    events = sum(record.events for record in result.records)
    return {
        "streams": streams,
        "events_per_s": round(events / elapsed_s),
        "cpu_share": round(worker["cpu_share"], 3),
        "cpu_us_per_event": round(worker["cpu_share"] * elapsed_s / max(events, 1) * 1e6, 1),
        "loop_lag_p99_ms": round(worker["loop_lag_p99_s"] * 1e3, 2),
        "ttft_error_p50_ms": _ms(ttfts, 0.50),
        "ttft_error_p99_ms": _ms(ttfts, 0.99),
        "gap_error_mean_ms": round(statistics.fmean(gaps) * 1e3, 3) if gaps else None,
        "gap_error_p99_ms": _ms(gaps, 0.99),
        "coalesced_share": round(sum(record.coalesced_events for record in measured) / max(events, 1), 4),
        "lost": sum(record.requested_output_tokens != record.output_tokens for record in measured),
    }


def _ms(ordered_s: list[float], share: float) -> float | None:
    return round(ordered_s[min(len(ordered_s) - 1, int(share * len(ordered_s)))] * 1e3, 3) if ordered_s else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,64,256")
    parser.add_argument("--first-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    for streams in map(int, given.streams.split(",")):
        rows.append(measure(streams, given.first_ms / 1e3, given.gap_ms / 1e3, given.seconds, given.tokens))
        print(" ".join(f"{name}={value}" for name, value in rows[-1].items()), file=sys.stderr)
    if given.json:
        where = {"machine": machine.describe_machine(), "libraries": machine.library_versions()}
        load = {"load_average": os.getloadavg()[0], "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        print(json.dumps({"rows": rows, **where, **load}, indent=2))


if __name__ == "__main__":
    main()
