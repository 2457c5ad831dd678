"""CPU time the router spends on one streamed token: from a decode reply to bytes on the socket, everything on.

    python benchmarks/router.py [--streams 64 512] [--tokens 400] [--repeats 5] [--json FILE]

The whole router runs in this process on uvicorn, over a model server that costs nothing: every step answers with the
same tokens. A second process reads the streams. What is counted is this process's CPU time between two steps of the
full batch, so neither requests nor the client are in it. performance-cpu.md section 4: pass 60 µs, goal 25, stretch 20.
"""

import argparse
import asyncio
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

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
from reference_server.router.facts import ServerFacts
from reference_server.router.infer import Infer, Permits
from reference_server.router.metrics import Metrics
from reference_server.router.model_files import find_model_files
from reference_server.router.scheduler import Scheduler, SchedulerOptions
from reference_server.router.server import HttpServer, bind
from reference_server.router.services import Services
from reference_server.router.validation import RequestLimits, Validator

ROUTES = ("/generate_stream", "/v1/chat/completions", "/v1/completions")
WARM_STEPS = 40


@dataclass
class FreeShard:
    """A model server without cost. `marks` are (CPU s, tokens) at the first and last full step that count."""

    streams: int
    steps: int
    held: list[Request] = field(default_factory=list)
    done: int = 0
    marks: list[float] = field(default_factory=list)
    reply: StepResult | None = None

    async def info(self) -> ModelInfo:
        raise NotImplementedError

    async def health(self) -> None: ...

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        raise NotImplementedError

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        self.held += batch.requests
        return self._answer(batch.id if cached is None else cached.id, batch.requests)

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        if len(self.held) < self.streams:
            return self._answer(batches[0].id, self.held)
        self.done += 1
        if self.done in (WARM_STEPS, self.steps - WARM_STEPS):
            self.marks.append(time.process_time())
        if self.reply is None:
            self.reply = self._answer(batches[0].id, self.held)
        if self.done < self.steps:
            return self.reply
        end = GeneratedText(" token", self.steps, FinishReason.EOS_TOKEN)
        last = tuple(_generation(request, end) for request in self.held)
        return StepResult(last, None, Timings())

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        raise NotImplementedError

    async def clear_cache(self, batch_id: int | None = None) -> None: ...

    def _answer(self, batch_id: int, requests: Sequence[Request]) -> StepResult:
        receipt = CachedBatch(batch_id, tuple(request.id for request in self.held), 16, len(self.held))
        return StepResult(tuple(map(_generation, requests)), receipt, Timings())

    def us_per_token(self) -> float:
        first, last = self.marks
        return (last - first) * 1e6 / ((self.steps - 2 * WARM_STEPS) * self.streams)


def _generation(request: Request, end: GeneratedText | None = None) -> Generation:
    return Generation(request.id, Tokens((42,), (-0.3400000035762787,), (" token",), (False,)), None, end)


async def measure(route: str, streams: int, steps: int) -> float:
    """µs of CPU a token."""
    limits = RequestLimits(max_input_tokens=4096, max_total_tokens=16384)
    files = find_model_files(PRESETS[0].model_id)
    shard = FreeShard(streams, steps)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    options = SchedulerOptions(1 << 20, 1 << 24, supports_chunking=True)
    batcher = Batcher(shard, Scheduler(options), observer=metrics)
    with ThreadPoolExecutor(2) as executor, bind("127.0.0.1", 0) as listener:
        infer = Infer(batcher, Validator(files.load_tokenizer(), limits, executor), Permits(streams), metrics)
        services = Services(infer, metrics, ServerFacts("m", limits, "0"), files.load_template())
        server = HttpServer(create_app(services, TransportOptions()), listener)
        serving = asyncio.ensure_future(server.run_to_end())
        loop = asyncio.ensure_future(batcher.run())
        port = listener.getsockname()[1]
        client = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--client", str(port), route, str(streams), str(steps)
        )
        if await client.wait() != 0:
            raise SystemExit("the client failed")
        server.should_exit = True
        await serving
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
    return shard.us_per_token()


async def read_streams(port: int, route: str, streams: int, steps: int) -> None:
    """The client: open `streams` streams and read them to their ends."""
    body: dict[str, object] = {"stream": True, "max_tokens": 1024}
    if route == "/generate_stream":
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 1024}}
    elif route == "/v1/completions":
        body["prompt"] = "hello"
    else:
        body["messages"] = [{"role": "user", "content": "hello"}]
    content = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content

    async def read_one() -> int:
        for _ in range(200):
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
        writer.write(request)
        events, tail = 0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            if not data:
                break
            events += data.count(b"data: ")
            tail = (tail + data)[-16:]
        writer.close()
        return events

    counts = await asyncio.gather(*(read_one() for _ in range(streams)))
    assert min(counts) >= steps, f"streams ended after {min(counts)} of {steps} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--tokens", type=int, default=400, help="steps of the full batch, at most 1000")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        port, route, streams, steps = options.client
        uvloop.run(read_streams(int(port), route, int(streams), int(steps)))
        return
    set_up_logging("info", LogFormat.TEXT, io.StringIO())
    results: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        for streams in options.streams:
            for route in ROUTES:
                name = f"{route} x {streams}"
                figure = uvloop.run(measure(route, streams, options.tokens))
                results.setdefault(name, []).append(figure)
                print(f"{repeat + 1}/{options.repeats} {name}: {figure:.1f} µs a token", file=sys.stderr)
    print(f"{'stream':32} {'median':>8} {'least':>8} {'most':>8}   µs of router CPU a token, lower is better")
    for name, figures in results.items():
        print(f"{name:32} {statistics.median(figures):8.1f} {min(figures):8.1f} {max(figures):8.1f}")
    if options.json:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"unit": "us/token", "machine": machine, "results": results}, indent=2))


if __name__ == "__main__":
    main()
