"""Cost of the router, compared with a bare Starlette endpoint that streams the same events in the same run.

    python benchmarks/router/http_cost.py [--streams 1 64 512] [--tokens 400] [--repeats 3] [--seconds 3] [--json FILE]

The whole router runs in this process on uvicorn and on one core. Its model server costs nothing: every step returns the
same tokens immediately. A second process on another core is the client. Four figures:

events/s        events that the client receives per second from its first request on, at full speed
µs a token      CPU time of this process between two steps of the full batch, without that of requests and client
latency         from the model server's answer to the client's read, at most 5,000 tokens and 50 steps a second
requests/s      blocking calls of one token over `CONNECTIONS` keep-alive connections
"""

import argparse
import asyncio
import gc
import io
import itertools
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from reference_server.messages import (
    Batch,
    CachedBatch,
    FinishReason,
    GeneratedText,
    Generation,
    ModelInfo,
    Request,
    StepResult,
    Timings,
    Tokens,
    WarmupReply,
    WarmupRequest,
)
from reference_server.observability import LogFormat, set_up_logging
from reference_server.presets.catalog import PRESETS
from reference_server.router.app import TransportOptions, create_app
from reference_server.router.batching import Batcher
from reference_server.router.chat.rendering_pool import RenderingPool
from reference_server.router.infer import Infer, Permits
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.server import HttpServer, bind
from reference_server.router.server_info import ServerInfo
from reference_server.router.services import Services
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.tokenizer_files import find_tokenizer_files
from reference_server.router.validation.request_rules import GenerationLimits
from reference_server.router.validation.validator import Validator

ROUTES = ("/generate_stream", "/v1/chat/completions", "/v1/completions")
BARE = "bare Starlette"
WARM_STEPS = 40
PACED_STEPS = 100
CONNECTIONS = 32

_STAMP = re.compile(rb"\d{19}")


@dataclass
class Steps:
    """Counts the steps of the full batch, and measures their CPU time in this process."""

    streams: int
    total: int
    is_paced: bool = False
    done: int = 0
    marks: list[float] = field(default_factory=list)

    async def next(self) -> str:
        """Wait for the next step; returns the text of its tokens, which is the time of the answer in a paced run."""
        self.done += 1
        if self.done in (WARM_STEPS, self.total - WARM_STEPS):
            self.marks.append(time.process_time())
        await asyncio.sleep(max(0.02, self.streams / 5000) if self.is_paced else 0)
        return f" {time.time_ns()}" if self.is_paced else " token"

    @property
    def is_last(self) -> bool:
        return self.done >= self.total

    def us_per_token(self) -> float:
        first, last = self.marks
        return (last - first) * 1e6 / ((self.total - 2 * WARM_STEPS) * self.streams)


class FreeShard:
    """A model server without cost. A one-token request ends with its prefill, any other with the last of `steps`."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._held: list[Request] = []
        self._reply: StepResult | None = None

    async def info(self) -> ModelInfo:
        raise NotImplementedError

    async def health(self) -> None: ...

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        raise NotImplementedError

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        if batch.requests[0].stopping.max_new_tokens == 1:
            end = GeneratedText(" token", 1, FinishReason.LENGTH)
            return StepResult(tuple(_generation(request, " token", end) for request in batch.requests), None, Timings())
        self._held += batch.requests
        return self._answer(batch.id if cached is None else cached.id, batch.requests, " 0")

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        if len(self._held) < self._steps.streams:
            # Without a pause, the steps of the first requests would leave no time for the others to arrive.
            await asyncio.sleep(0.001)
            return self._answer(batches[0].id, self._held, " 0")
        text = await self._steps.next()
        if self._reply is None or self._steps.is_paced:
            self._reply = self._answer(batches[0].id, self._held, text)
        if not self._steps.is_last:
            return self._reply
        end = GeneratedText(text, self._steps.done, FinishReason.EOS_TOKEN)
        return StepResult(tuple(_generation(request, text, end) for request in self._held), None, Timings())

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        raise NotImplementedError

    async def clear_cache(self, batch_id: int | None = None) -> None: ...

    def _answer(self, batch_id: int, requests: Sequence[Request], text: str) -> StepResult:
        receipt = CachedBatch(batch_id, tuple(request.id for request in self._held), 16, len(self._held))
        return StepResult(tuple(_generation(request, text) for request in requests), receipt, Timings())


def _generation(request: Request, text: str, end: GeneratedText | None = None) -> Generation:
    return Generation(request.id, Tokens((42,), (-0.3400000035762787,), (text,), (False,)), None, end)


@asynccontextmanager
async def router(steps: Steps) -> AsyncIterator[int]:
    """The whole router with a `FreeShard`; the value is its port."""
    limits = GenerationLimits(max_input_tokens=4096, max_total_tokens=16384)
    files = find_tokenizer_files(PRESETS[0].model_id)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    options = SchedulerOptions(1 << 20, 1 << 24, supports_chunking=True)
    batcher = Batcher(FreeShard(steps), Scheduler(options), observer=metrics, turns_to_send=0)
    loop = asyncio.ensure_future(batcher.run())
    with ThreadPoolExecutor(2) as executor:
        infer = Infer(batcher, Validator(files.load_tokenizer(), limits, executor), Permits(1024), metrics)
        template = files.load_template()
        assert template is not None, "the preset has one"
        rendering = RenderingPool(template, workers=2, max_waiting=1024)
        await rendering.start()
        services = Services(infer, metrics, ServerInfo("m", limits, "0"), rendering.render)
        async with listening(create_app(services, TransportOptions())) as port:
            yield port
        await rendering.close()
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


@asynccontextmanager
async def bare(steps: Steps) -> AsyncIterator[int]:
    """An application that only sends the text of every step to each open stream; the value is its port."""
    readers: list[asyncio.Queue[str | None]] = []

    async def produce() -> None:
        while not steps.is_last:
            if len(readers) < steps.streams:
                await asyncio.sleep(0.001)
                continue
            text: str | None = await steps.next()
            for reader in readers:
                reader.put_nowait(text)
        for reader in readers:
            reader.put_nowait(None)

    async def events(reader: asyncio.Queue[str | None]) -> AsyncIterator[bytes]:
        while (text := await reader.get()) is not None:
            yield b"data: %b\n\n" % orjson.dumps({"token": {"id": 42, "text": text}})

    async def stream(request: HttpRequest) -> StreamingResponse:
        await request.body()
        reader: asyncio.Queue[str | None] = asyncio.Queue()
        readers.append(reader)
        return StreamingResponse(events(reader), media_type="text/event-stream")

    async def answer(request: HttpRequest) -> JSONResponse:
        return JSONResponse({"generated_text": (await request.json())["inputs"]})

    producer = asyncio.ensure_future(produce())
    routes = [Route("/generate_stream", stream, methods=["POST"]), Route("/generate", answer, methods=["POST"])]
    async with listening(Starlette(routes=routes)) as port:
        yield port
    producer.cancel()
    await asyncio.gather(producer, return_exceptions=True)


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    with bind("127.0.0.1", 0) as listener:
        server = HttpServer(app, listener)
        serving = asyncio.ensure_future(server.run_to_end())
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


async def measure_stream(name: str, streams: int, tokens: int) -> dict[str, float]:
    """Events per second and µs per token at full speed, and latencies in ms at a steady pace."""
    serve, route = (bare, ROUTES[0]) if name == BARE else (router, name)
    tokens = tokens if streams > 1 else 1000
    free = Steps(streams, tokens)
    async with serve(free) as port:
        received = await run_client("stream", port, route, streams, tokens)
    async with serve(Steps(streams, PACED_STEPS, is_paced=True)) as port:
        paced = await run_client("stream", port, route, streams, PACED_STEPS)
    return {
        "events/s": received["events_per_s"],
        "µs a token": free.us_per_token(),
        "p50 ms": paced["p50_ms"],
        "p99 ms": paced["p99_ms"],
    }


async def measure_calls(name: str, seconds: float) -> dict[str, float]:
    """Blocking calls per second, and CPU time of this process per call."""
    async with (bare if name == BARE else router)(Steps(1, 1)) as port:
        before_s = time.process_time()
        per_s = (await run_client("call", port, "/generate", CONNECTIONS, seconds))["requests_per_s"]
        return {"requests/s": per_s, "µs a call": (time.process_time() - before_s) * 1e6 / (per_s * seconds)}


async def run_client(kind: str, port: int, route: str, count: int, amount: float) -> dict[str, float]:
    """Run the client process; returns its figures. Raises SystemExit if it fails."""
    command = (sys.executable, __file__, "--client", kind, str(port), route, str(count), str(amount))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise SystemExit("the client failed")
    figures: dict[str, float] = json.loads(output)
    return figures


async def read_streams(port: int, route: str, streams: int, steps: float) -> dict[str, float]:
    """The client: open `streams` streams, and read each to its end."""
    body: dict[str, object] = {"stream": True, "max_tokens": 1024}
    if route == "/generate_stream":
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 1024}}
    elif route == "/v1/completions":
        body["prompt"] = "hello"
    else:
        body["messages"] = [{"role": "user", "content": "hello"}]
    request = render_request(route, body)
    latencies_ms: list[float] = []
    ends_s: list[float] = []

    async def read_one() -> int:
        reader, writer = await connect(port)
        writer.write(request)
        events, tail = 0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            if not data:
                break
            now_ns = time.time_ns()
            latencies_ms.extend((now_ns - int(stamp)) / 1e6 for stamp in _STAMP.findall(data))
            events += data.count(b"data: ")
            tail = (tail + data)[-16:]
        ends_s.append(time.perf_counter())
        writer.close()
        return events

    began_s = time.perf_counter()
    counts = await asyncio.gather(*(read_one() for _ in range(streams)))
    assert min(counts) >= steps, f"streams ended after {min(counts)} of {steps} tokens"
    ordered = sorted(latencies_ms)
    return {
        "events_per_s": sum(counts) / (max(ends_s) - began_s),
        "p50_ms": ordered[len(ordered) // 2] if ordered else 0.0,
        "p99_ms": ordered[len(ordered) * 99 // 100] if ordered else 0.0,
    }


async def call_repeatedly(port: int, route: str, connections: int, seconds: float) -> dict[str, float]:
    """The client: one-token calls, one after another on each connection."""
    request = render_request(route, {"inputs": "hello", "parameters": {"max_new_tokens": 1}})

    async def call() -> int:
        reader, writer = await connect(port)
        for calls in itertools.count():
            if time.perf_counter() > end:
                writer.close()
                return calls
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            (length,) = re.findall(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length))
        raise AssertionError("counted to the end")

    end = time.perf_counter() + seconds
    return {"requests_per_s": sum(await asyncio.gather(*(call() for _ in range(connections)))) / seconds}


def render_request(route: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(200):
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)
    raise SystemExit("the server does not listen")


CLIENTS: dict[str, Callable[[int, str, int, float], Awaitable[dict[str, float]]]] = {
    "stream": read_streams,
    "call": call_repeatedly,
}


def pin(core: int) -> None:
    """Pin this process to one core, if the machine allows it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--tokens", type=int, default=400, help="steps of the full batch, at most 1000")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of the blocking calls' measurement")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        kind, port, route, count, amount = options.client
        pin(1)
        figures = uvloop.run(CLIENTS[kind](int(port), route, int(count), float(amount)))
        print(json.dumps(figures))
        return
    set_up_logging("info", LogFormat.TEXT, io.StringIO())
    # As in the router before it serves: otherwise a few tokens include a full collection over all imported objects.
    gc.collect()
    gc.freeze()
    pin(0)
    streamed: dict[str, list[dict[str, float]]] = {}
    calls: dict[str, list[dict[str, float]]] = {}
    for repeat in range(options.repeats):
        print(f"{repeat + 1}/{options.repeats}", file=sys.stderr)
        for name in (BARE, *ROUTES):
            for streams in options.streams:
                streamed.setdefault(f"{name} x {streams}", []).append(
                    uvloop.run(measure_stream(name, streams, options.tokens))
                )
        for name in (BARE, ROUTES[0].removesuffix("_stream")):
            calls.setdefault(name, []).append(uvloop.run(measure_calls(name, options.seconds)))
    print_table("stream x clients", streamed)
    print()
    print_table(f"calls over {CONNECTIONS} connections", calls)
    if options.json:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"machine": machine, "streams": streamed, "calls": calls}, indent=2))


def print_table(title: str, rows: dict[str, list[dict[str, float]]]) -> None:
    """Medians over the repeats, and the range of the second column, a CPU time."""
    columns = list(next(iter(rows.values()))[0])
    print(f"{title:32}" + "".join(f"{column:>12}" for column in columns) + f"   range of {columns[1]}")
    for name, runs in rows.items():
        medians = [statistics.median(run[column] for run in runs) for column in columns]
        costs = [run[columns[1]] for run in runs]
        figures = f"{medians[0]:12,.0f}" + "".join(f"{value:12.2f}" for value in medians[1:])
        print(f"{name:32}{figures}   {min(costs):.2f}–{max(costs):.2f}")


if __name__ == "__main__":
    main()
