"""What reading token streams costs this load generator and others, and how far their times are from the truth.

A server in a process of its own writes every token at a known moment (`loadgen.truth_server`). Each client in turn puts
the same closed loop on it: ours; a bare asyncio socket client; aiohttp; locust's HttpUser with `iter_lines`. Every one
decodes the JSON of every event. Prints, per client and load, CPU seconds per 1,000 events, events a core could take,
and the error of TTFT and gaps; then the processor time that `tgi-bench run` takes up to its first request. Clients take
turns, `--rounds` times, and rows hold medians; `--json` for one object with machine and versions.

    python benchmarks/client.py
    python benchmarks/client.py --streams 16,64 --clients ours,aiohttp --seconds 10 --rounds 3
"""

import argparse
import asyncio
import contextlib
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

from loadgen import machine
from loadgen.control import ControlClient
from loadgen.selftest import FIRST_S, GAP_S, LEAST_TOKENS, MOST_TOKENS, mean, measure_level, quantile
from loadgen.truth_server import truth_server

CLIENTS = ("ours", "asyncio", "aiohttp", "locust")
Request = dict[str, Any]


class Log:
    """What a client saw: one row per request that ended, and the CPU time of it all."""

    def __init__(self, seconds: float) -> None:
        self._numbers = itertools.count()
        self._requests: list[Request] = []
        self._cpu_s, self._begin_s = time.process_time(), time.perf_counter()
        self._end_s = self._begin_s + seconds

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self._end_s

    def begin(self) -> tuple[Request, dict[str, Any]]:
        """A new row and the request's JSON."""
        number = next(self._numbers)
        inputs = f"request {number}"
        tokens = LEAST_TOKENS + 37 * number % (MOST_TOKENS - LEAST_TOKENS + 1)
        row: Request = {"inputs": inputs, "sent_ns": time.perf_counter_ns(), "event_ns": []}
        return row, {"inputs": inputs, "parameters": {"max_new_tokens": tokens}}

    def end(self, row: Request) -> None:
        self._requests.append(row)

    def finish(self) -> None:
        """Print everything as JSON."""
        wall_s, cpu_s = time.perf_counter() - self._begin_s, time.process_time() - self._cpu_s
        print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "requests": self._requests}))


def note(row: Request, line: bytes) -> None:
    """Time a line that carries a token, then decode it."""
    if line.startswith(b"data:"):
        row["event_ns"].append(time.perf_counter_ns())
        json.loads(line[5:])


async def load_with(streams: int, log: Log, one: Callable[[Log], Awaitable[None]]) -> None:
    async def user() -> None:
        while not log.is_over:
            await one(log)

    await asyncio.gather(*(user() for _ in range(streams)))


def run_asyncio(url: str, streams: int, seconds: float) -> None:
    parts = urlsplit(url)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def one(log: Log) -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(parts.hostname, parts.port)
        row, asked = log.begin()
        body = json.dumps(asked).encode()
        writer.write(b"POST /generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        while (line := await reader.readline()) != b"0\r\n":
            note(row, line)
        await reader.readline()
        log.end(row)
        idle.append((reader, writer))

    async def main() -> None:
        log = Log(seconds)
        await load_with(streams, log, one)
        log.finish()
        for _, writer in idle:
            writer.close()

    asyncio.run(main())


def run_aiohttp(url: str, streams: int, seconds: float) -> None:
    import aiohttp

    async def main() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(log: Log) -> None:
                row, asked = log.begin()
                async with session.post(f"{url}/generate_stream", json=asked) as response:
                    async for line in response.content:
                        note(row, line)
                log.end(row)

            log = Log(seconds)
            await load_with(streams, log, one)
            log.finish()

    asyncio.run(main())


def run_locust(url: str, streams: int, seconds: float) -> None:
    import gevent
    import locust
    import locust.env

    log: Log

    class Reader(locust.HttpUser):  # type: ignore[misc]
        host = url

        @locust.task  # type: ignore[untyped-decorator]
        def read(self) -> None:
            row, asked = log.begin()
            for line in self.client.post("/generate_stream", json=asked, stream=True).iter_lines():
                note(row, line)
            log.end(row)
            if log.is_over:
                raise locust.exception.StopUser

    environment = locust.env.Environment(user_classes=[Reader])
    runner = environment.create_local_runner()
    log = Log(seconds)
    runner.start(streams, spawn_rate=streams)
    while not log.is_over or runner.user_count:
        gevent.sleep(0.05)
    log.finish()
    runner.quit()


RUN = {"asyncio": run_asyncio, "aiohttp": run_aiohttp, "locust": run_locust}


def measure(client: str, streams: int, seconds: float) -> dict[str, Any]:
    """One client under one load, as a row."""
    if client == "ours":
        level = measure_level(streams, seconds)
        return {
            "client": client,
            "streams": streams,
            "events_per_s": round(level.events_per_s),
            "cpu_s_per_1000": round(level.cpu_us_per_event / 1e3, 4),
            "events_per_s_per_core": round(1e6 / level.cpu_us_per_event),
            "ttft_error_mean_ms": round(level.ttft_error_mean_ms, 3),
            "ttft_error_p99_ms": round(level.ttft_error_p99_ms, 3),
            "gap_error_p50_ms": round(level.gap_error_p50_ms, 3),
            "gap_error_p99_ms": round(level.gap_error_p99_ms, 3),
            "lost": level.lost_events,
        }
    with truth_server(FIRST_S, GAP_S) as url:
        words = [sys.executable, __file__, "--client", client, "--url", url, "--streams", str(streams)]
        done = subprocess.run([*words, "--seconds", str(seconds)], stdout=subprocess.PIPE, check=True)
        control = ControlClient(url)
        truth = json.loads(control.get("/truth")[1])
        control.close()
    return describe(client, streams, json.loads(done.stdout), {row["inputs"]: row["written_ns"] for row in truth})


def measure_start() -> dict[str, Any]:
    """What `tgi-bench run` and its worker have used when the first request arrives, and when all is written."""
    import psutil

    samples: list[tuple[int, float]] = []
    with truth_server(0.01, 0.01) as url, tempfile.TemporaryDirectory() as folder:
        words = ["-m", "loadgen.cli", "run", "--url", url, "--out", f"{folder}/run", "--duration", "1s"]
        words += ["--warmup", "0s", "--concurrency", "1", "--output-tokens", "4"]
        begun_ns = time.perf_counter_ns()
        command = psutil.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while command.poll() is None:
            samples.append((time.perf_counter_ns(), tree_cpu_s(command)))
            time.sleep(0.01)
        control = ControlClient(url)
        first_ns = min(row["arrived_ns"] for row in json.loads(control.get("/truth")[1]))
        control.close()
    return {
        "client": "ours",
        "start_cpu_s": round(max(cpu_s for at_ns, cpu_s in samples if at_ns <= first_ns), 2),
        "start_wall_s": round((first_ns - begun_ns) / 1e9, 2),
        "whole_cpu_s": round(max(cpu_s for _, cpu_s in samples), 2),
    }


def tree_cpu_s(command: Any) -> float:
    """Processor time of a process, of its children, and of those that have ended; 0 when it is gone."""
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
    """One client under one load, over the rounds; what was lost is summed."""
    measured = [name for name in rows[0] if name not in ("client", "streams", "lost")]
    middle = {name: round(statistics.median(row[name] for row in rows), 4) for name in measured}
    return {**rows[0], **middle, "lost": sum(row["lost"] for row in rows)}


def describe(client: str, streams: int, seen: dict[str, Any], written: dict[str, list[int]]) -> dict[str, Any]:
    """Seen against true, over all requests."""
    ttft: dict[str, list[float]] = {"seen": [], "true": []}
    gaps: dict[str, list[float]] = {"seen": [], "true": []}
    events = lost = 0
    for row in seen["requests"]:
        moments = {"seen": row["event_ns"], "true": written[row["inputs"]]}
        events += len(row["event_ns"])
        lost += abs(len(moments["seen"]) - len(moments["true"]))
        for name, at_ns in moments.items():
            ttft[name].append((at_ns[0] - row["sent_ns"]) / 1e6)
            gaps[name] += [(later - earlier) / 1e6 for earlier, later in itertools.pairwise(at_ns)]

    def error(values: dict[str, list[float]], share: float) -> float:
        return round(quantile(values["seen"], share) - quantile(values["true"], share), 3)

    return {
        "client": client,
        "streams": streams,
        "events_per_s": round(events / seen["wall_s"]),
        "cpu_s_per_1000": round(1e3 * seen["cpu_s"] / events, 4),
        "events_per_s_per_core": round(events / seen["cpu_s"]),
        "ttft_error_mean_ms": round(mean(ttft["seen"]) - mean(ttft["true"]), 3),
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
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--client", choices=tuple(RUN), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        RUN[given.client](given.url, int(given.streams), given.seconds)
        return
    rows = []
    for streams in map(int, given.streams.split(",")):
        clients = given.clients.split(",")
        rounds = [[measure(client, streams, given.seconds) for client in clients] for _ in range(given.rounds)]
        rows += [median_row(of_one) for of_one in zip(*rounds, strict=True)]
        for row in rows[-len(clients) :]:
            print(" ".join(f"{name}={value}" for name, value in row.items()), file=sys.stderr)
    start = measure_start()
    print(" ".join(f"{name}={value}" for name, value in start.items()), file=sys.stderr)
    if given.json:
        where = {"machine": machine.describe_machine(), "libraries": machine.library_versions()}
        load = {"load_average": os.getloadavg()[0], "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        print(json.dumps({"rows": rows, "start": start, **where, **load}, indent=2))


if __name__ == "__main__":
    main()
