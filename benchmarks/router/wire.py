"""Cost of the wires between router and model server: the codec, and a Decode round trip over gRPC and over the link.

    python benchmarks/router/wire.py [--rows 1 8 32] [--calls 1000] [--repeats 5] [--json FILE]

The server is a separate process whose steps cost nothing. Its calls run in a compute thread, like those of a model.
Both wires lead to the same process, and their repeats are interleaved. Server and client run on uvloop, like the
router, or on asyncio's loop. CPU time is measured on both sides.
"""

import argparse
import asyncio
import functools
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import uvloop
from google.protobuf.internal import api_implementation

from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    Generation,
    Request,
    StepResult,
    StoppingParameters,
    Timings,
    Tokens,
)
from reference_server.transport.codec import WireCodec
from reference_server.transport.compute_thread import ComputeThread
from reference_server.transport.grpc_channel import GrpcChannel
from reference_server.transport.link_channel import LinkChannel
from reference_server.transport.remote_shard import RemoteShard
from reference_server.transport.service import serving
from reference_server.transport.shard import BlockingShard, Shard
from reference_server.transport.wire_schema import load_schema

LOOPS: dict[str, Callable[[Coroutine[Any, Any, None]], None]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}


class FreeCalls:
    """A shard with a single call, Decode, which costs nothing and returns one token for each request."""

    info = health = warmup = prefill = filter_batch = clear_cache = load_adapter = unload_adapter = None

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after_reply(self) -> None:
        pass

    def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        return step(batches[0].size)


class PostedCalls:
    """`FreeCalls` for gRPC: calls are posted to the compute thread."""

    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        return await self._thread.call(functools.partial(self._thread.shard.decode, batches))


def step(rows: int) -> StepResult:
    generations = tuple(
        Generation(number, Tokens((number + 5,), (-0.25 * number,), (" word",), (False,))) for number in range(rows)
    )
    return StepResult(generations, receipt(rows), Timings(1_000_000, 100_000, 1_200_000))


def receipt(rows: int) -> CachedBatch:
    return CachedBatch(1, tuple(range(rows)), 4096, rows)


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Medians over calls, in µs, and the range of the repeats' medians. CPU is user and system time per call."""

    wire: str
    loop: str
    rows: int
    round_trip_us: float
    client_cpu_us: float
    server_cpu_us: float
    lowest_us: float
    highest_us: float


async def serve(path: str) -> None:
    """Serve until stdin closes; print the used CPU seconds after each line of stdin."""
    thread = ComputeThread(cast(BlockingShard, FreeCalls()))
    async with serving(cast(Shard, PostedCalls(thread)), path, [path], thread):
        loop = asyncio.get_running_loop()
        print("ready", flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            usage = resource.getrusage(resource.RUSAGE_SELF)
            print(usage.ru_utime + usage.ru_stime, flush=True)


def measure_codec(rows: int, calls: int) -> dict[str, float]:
    schema = load_schema("v3")
    codec, kind = WireCodec(schema), schema.messages["DecodeResponse"]
    result = step(rows)
    message = codec.encode_step(result, "DecodeResponse")
    data = message.SerializeToString()
    prompt = Request(1, ("word " * 128,), 1024, ChooserParameters(), StoppingParameters(64))
    batch = Batch(1, (prompt,))
    return {
        "encode_reply_us": best_us(lambda: codec.encode_step(result, "DecodeResponse").SerializeToString(), calls),
        "decode_reply_us": best_us(lambda: codec.decode_step(kind.FromString(data)), calls),
        "encode_prefill_us": best_us(lambda: codec.encode_prefill_request(batch, None, 16).SerializeToString(), calls),
    }


def best_us(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls)
    return min(times) * 1e6


async def measure_round_trips(path: str, server: subprocess.Popen[str], args: argparse.Namespace) -> list[RoundTrip]:
    shards = {
        "grpc": RemoteShard(await GrpcChannel.open(path)),
        "link": RemoteShard(await LinkChannel.open(path)),
    }
    loop = "uvloop" if isinstance(asyncio.get_running_loop(), uvloop.Loop) else "asyncio"
    measured = []
    for rows in args.rows:
        found: dict[str, Samples] = {wire: Samples() for wire in shards}
        for _ in range(args.repeats):
            for wire, shard in shards.items():
                await add_repeat(found[wire], shard, [receipt(rows)], server, args.calls)
        measured += [RoundTrip(wire, loop, rows, *samples.summary_us()) for wire, samples in found.items()]
    for shard in shards.values():
        await shard.close()
    return measured


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of each round trip, and of each repeat its median round trip and its CPU seconds per call."""

    round_trip: list[float] = field(default_factory=list)
    round_trip_of_repeats: list[float] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)

    def summary_us(self) -> tuple[float, float, float, float, float]:
        """Medians of round trip, client and server, then the range of the round trip over the repeats."""
        first, second, third = (
            statistics.median(values) * 1e6 for values in (self.round_trip, self.client_cpu, self.server_cpu)
        )
        repeats = self.round_trip_of_repeats
        return first, second, third, min(repeats) * 1e6, max(repeats) * 1e6


async def add_repeat(
    samples: Samples, shard: RemoteShard, batches: list[CachedBatch], server: subprocess.Popen[str], calls: int
) -> None:
    server_before, client_before = cpu_seconds_of(server), time.process_time()
    for _ in range(calls):
        started = time.perf_counter()
        await shard.decode(batches)
        samples.round_trip.append(time.perf_counter() - started)
    samples.round_trip_of_repeats.append(statistics.median(samples.round_trip[-calls:]))
    samples.client_cpu.append((time.process_time() - client_before) / calls)
    samples.server_cpu.append((cpu_seconds_of(server) - server_before) / calls)


def cpu_seconds_of(server: subprocess.Popen[str]) -> float:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    return float(server.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("LOOP", "PATH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        LOOPS[args.serve[0]](serve(args.serve[1]))
        return
    codec = {rows: measure_codec(rows, args.calls) for rows in args.rows}
    for rows, times in codec.items():
        print(f"{rows:3} rows:", ", ".join(f"{name} {value:.0f}" for name, value in times.items()))
    round_trips: list[RoundTrip] = []
    for loop in LOOPS:
        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/shard-0"
            command = [sys.executable, __file__, "--serve", loop, path]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                server.stdout.readline()
                run = asyncio.run if loop == "asyncio" else uvloop.run
                round_trips += run(measure_round_trips(path, server, args))
    for trip in round_trips:
        print(
            f"{trip.wire} {trip.loop:8} {trip.rows:3} rows: round trip {trip.round_trip_us:.0f} us "
            f"({trip.lowest_us:.0f}–{trip.highest_us:.0f}), "
            f"CPU client {trip.client_cpu_us:.0f} us, server {trip.server_cpu_us:.0f} us"
        )
    if args.json:
        versions = {
            "python": platform.python_version(),
            "grpc": grpc.__version__,
            "protobuf": api_implementation.Type(),
        }
        results = {"machine": platform.machine(), "versions": versions, "codec": codec}
        args.json.write_text(json.dumps(results | {"round_trips": [asdict(trip) for trip in round_trips]}, indent=1))


if __name__ == "__main__":
    main()
