"""CPU cost and timing error of this load generator and of other clients that read token streams.

A server in its own process records the time of each write (`reference_timing_server`). Each client in turn runs the
same closed loop against it: ours; a plain asyncio socket client; aiohttp, if installed; locust's HttpUser with
`iter_lines`. All clients decode the JSON of every event. Prints, per client and load, CPU seconds per 1,000 events,
events per second and core, and the errors of TTFT and gaps; our row also has the error of TTFT from the time of the
read. Then prints the CPU time of `tgi-bench run` up to its first request. Clients alternate for `--rounds` rounds, and
a row has medians. `--json` prints one object with machine and versions.

    python benchmarks/client/client.py
    python benchmarks/client/client.py --streams 16,64 --clients ours,aiohttp --seconds 10 --rounds 3
"""

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from loadgen.selftest.client_check import FIRST_S, GAP_S, MAX_TOKENS, MIN_TOKENS, measure_level
from loadgen.selftest.reference_timing_server import timing_server
from loadgen.selftest.stream_times import mean, quantile
from loadgen.target import machine
from loadgen.target.control import ControlClient

CLIENTS = ("ours", "asyncio", "aiohttp", "locust")
Request = dict[str, Any]


class ClientLog:
    """The observations of a client: one row per finished request, and the total CPU time."""

    def __init__(self, seconds: float) -> None:
        self._numbers = itertools.count()
        self._requests: list[Request] = []
        self._cpu_s, self._begin_s = time.process_time(), time.perf_counter()
        self._end_s = self._begin_s + seconds

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self._end_s

    def begin(self) -> tuple[Request, dict[str, Any]]:
        """A new row, and the JSON of its request."""
        number = next(self._numbers)
        inputs = f"request {number}"
        tokens = MIN_TOKENS + 37 * number % (MAX_TOKENS - MIN_TOKENS + 1)
        row: Request = {"inputs": inputs, "sent_ns": time.perf_counter_ns(), "event_ns": []}
        return row, {"inputs": inputs, "parameters": {"max_new_tokens": tokens}}

    def end(self, row: Request) -> None:
        self._requests.append(row)

    def finish(self) -> None:
        """Print everything as JSON."""
        wall_s, cpu_s = time.perf_counter() - self._begin_s, time.process_time() - self._cpu_s
        print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "requests": self._requests}))


def record_line(row: Request, line: bytes) -> None:
    """Record the time of a line with a token, then decode it."""
    if line.startswith(b"data:"):
        row["event_ns"].append(time.perf_counter_ns())
        json.loads(line[5:])


async def load_with(streams: int, log: ClientLog, one: Callable[[ClientLog], Awaitable[None]]) -> None:
    async def user() -> None:
        while not log.is_over:
            await one(log)

    await asyncio.gather(*(user() for _ in range(streams)))


def run_asyncio(url: str, streams: int, seconds: float) -> None:
    parts = urlsplit(url)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def one(log: ClientLog) -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(parts.hostname, parts.port)
        row, request = log.begin()
        body = json.dumps(request).encode()
        writer.write(b"POST /generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        while (line := await reader.readline()) != b"0\r\n":
            record_line(row, line)
        await reader.readline()
        log.end(row)
        idle.append((reader, writer))

    async def main() -> None:
        log = ClientLog(seconds)
        await load_with(streams, log, one)
        log.finish()
        for _, writer in idle:
            writer.close()

    asyncio.run(main())


def run_aiohttp(url: str, streams: int, seconds: float) -> None:
    import aiohttp

    async def main() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(log: ClientLog) -> None:
                row, request = log.begin()
                async with session.post(f"{url}/generate_stream", json=request) as response:
                    async for line in response.content:
                        record_line(row, line)
                log.end(row)

            log = ClientLog(seconds)
            await load_with(streams, log, one)
            log.finish()

    asyncio.run(main())


def run_locust(url: str, streams: int, seconds: float) -> None:
    import gevent
    import locust
    import locust.env

    log: ClientLog

    class Reader(locust.HttpUser):  # type: ignore[misc]
        host = url

        @locust.task  # type: ignore[untyped-decorator]
        def read(self) -> None:
            row, request = log.begin()
            for line in self.client.post("/generate_stream", json=request, stream=True).iter_lines():
                record_line(row, line)
            log.end(row)
            if log.is_over:
                raise locust.exception.StopUser

    environment = locust.env.Environment(user_classes=[Reader])
    runner = environment.create_local_runner()
    log = ClientLog(seconds)
    runner.start(streams, spawn_rate=streams)
    while not log.is_over or runner.user_count:
        gevent.sleep(0.05)
    log.finish()
    runner.quit()


RUN = {"asyncio": run_asyncio, "aiohttp": run_aiohttp, "locust": run_locust}


def measure(client: str, streams: int, seconds: float, *, bursts: bool = False) -> dict[str, Any]:
    """One client under one load, as a row."""
    if client == "ours":
        level = measure_level(streams, seconds, sends_bursts=bursts)
        return {
            "client": client,
            "streams": streams,
            "events_per_s": round(level.events_per_s),
            "cpu_s_per_1000": round(level.cpu_us_per_event / 1e3, 4),
            "events_per_s_per_core": round(1e6 / level.cpu_us_per_event),
            "ttft_error_mean_ms": round(level.ttft_error_mean_ms, 3),
            "ttft_error_p99_ms": round(level.ttft_error_p99_ms, 3),
            "read_ttft_error_mean_ms": round(level.read_ttft_error_mean_ms, 3),
            "read_ttft_error_p99_ms": round(level.read_ttft_error_p99_ms, 3),
            "bounded_gaps_share": round(level.bounded_gaps_share, 4),
            "gap_error_p50_ms": round(level.gap_error_p50_ms, 3),
            "gap_error_p99_ms": round(level.gap_error_p99_ms, 3),
            "lost": level.lost_events,
        }
    with timing_server(FIRST_S, GAP_S, sends_bursts=bursts) as url:
        words = [sys.executable, __file__, "--client", client, "--url", url, "--streams", str(streams)]
        done = subprocess.run([*words, "--seconds", str(seconds)], stdout=subprocess.PIPE, check=True)
        control = ControlClient(url)
        reference = json.loads(control.get("/times")[1])
        control.close()
    return describe(client, streams, json.loads(done.stdout), {row["inputs"]: row["written_ns"] for row in reference})


def measure_start() -> dict[str, Any]:
    """CPU time of `tgi-bench run` and its worker until the first request arrives, and until the end."""
    import psutil

    samples: list[tuple[int, float]] = []
    with timing_server(0.01, 0.01) as url, tempfile.TemporaryDirectory() as folder:
        words = ["-m", "loadgen.cli", "run", "--url", url, "--out", f"{folder}/run", "--duration", "1s"]
        words += ["--warmup", "0s", "--concurrency", "1", "--output-tokens", "4"]
        begun_ns = time.perf_counter_ns()
        command = psutil.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while command.poll() is None:
            samples.append((time.perf_counter_ns(), tree_cpu_s(command)))
            time.sleep(0.01)
        control = ControlClient(url)
        first_ns = min(row["arrived_ns"] for row in json.loads(control.get("/times")[1]))
        control.close()
    return {
        "client": "ours",
        "start_cpu_s": round(max(cpu_s for at_ns, cpu_s in samples if at_ns <= first_ns), 2),
        "start_wall_s": round((first_ns - begun_ns) / 1e9, 2),
        "whole_cpu_s": round(max(cpu_s for _, cpu_s in samples), 2),
    }


def tree_cpu_s(command: Any) -> float:
    """CPU time of a process and its children, including ended ones; 0 if the process is gone."""
    import psutil

    total_s = 0.0
    with contextlib.suppress(psutil.Error):
        own = command.cpu_times()
        total_s += own.user + own.system + own.children_user + own.children_system
        for child in command.children(recursive=True):
            used = child.cpu_times()
            total_s += used.user + used.system
    return total_s


def median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one client under one load over the rounds; lost events are summed."""
    measured = [name for name in rows[0] if name not in ("client", "streams", "lost")]
    middle = {name: round(statistics.median(row[name] for row in rows), 4) for name in measured}
    return {**rows[0], **middle, "lost": sum(row["lost"] for row in rows)}


def describe(client: str, streams: int, observed: dict[str, Any], written: dict[str, list[int]]) -> dict[str, Any]:
    """A row of a client: its cost, and its observed times compared with the reference times."""
    ttft: dict[str, list[float]] = {"observed": [], "reference": []}
    gaps: dict[str, list[float]] = {"observed": [], "reference": []}
    events = lost = 0
    for row in observed["requests"]:
        moments = {"observed": row["event_ns"], "reference": written[row["inputs"]]}
        events += len(row["event_ns"])
        lost += abs(len(moments["observed"]) - len(moments["reference"]))
        for name, at_ns in moments.items():
            ttft[name].append((at_ns[0] - row["sent_ns"]) / 1e6)
            gaps[name] += [(later - earlier) / 1e6 for earlier, later in itertools.pairwise(at_ns)]

    def error(values: dict[str, list[float]], fraction: float) -> float:
        return round(quantile(values["observed"], fraction) - quantile(values["reference"], fraction), 3)

    return {
        "client": client,
        "streams": streams,
        "events_per_s": round(events / observed["wall_s"]),
        "cpu_s_per_1000": round(1e3 * observed["cpu_s"] / events, 4),
        "events_per_s_per_core": round(events / observed["cpu_s"]),
        "ttft_error_mean_ms": round(mean(ttft["observed"]) - mean(ttft["reference"]), 3),
        "ttft_error_p99_ms": error(ttft, 0.99),
        "gap_error_p50_ms": error(gaps, 0.5),
        "gap_error_p99_ms": error(gaps, 0.99),
        "lost": lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64,256")
    parser.add_argument("--clients", default=",".join(CLIENTS))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bursts", action="store_true", help="send the tokens of all streams at once")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--client", choices=tuple(RUN), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        RUN[args.client](args.url, int(args.streams), args.seconds)
        return
    rows = []
    for streams in map(int, args.streams.split(",")):
        clients = [name for name in args.clients.split(",") if name != "aiohttp" or importlib.util.find_spec(name)]
        rounds = [
            [measure(client, streams, args.seconds, bursts=args.bursts) for client in clients]
            for _ in range(args.rounds)
        ]
        rows += [median_row(of_one) for of_one in zip(*rounds, strict=True)]
        for row in rows[-len(clients) :]:
            print(" ".join(f"{name}={value}" for name, value in row.items()), file=sys.stderr)
    start = measure_start()
    print(" ".join(f"{name}={value}" for name, value in start.items()), file=sys.stderr)
    if args.json:
        where = {"machine": machine.describe_machine(), "libraries": machine.library_versions()}
        load = {"load_average": os.getloadavg()[0], "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        print(json.dumps({"rows": rows, "start": start, **where, **load}, indent=2))


if __name__ == "__main__":
    main()
