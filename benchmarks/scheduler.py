"""What the router's scheduling costs, without HTTP and without a model.

    python benchmarks/scheduler.py [--streams 64 512] [--tokens 64] [--repeats 5] [--json PATH]

Two numbers per case, in µs of process CPU per streamed token: the whole loop (Scheduler, batching, one reader task per
stream), and the scripted shard that answers it, measured alone and taken off. Decisions of the Scheduler alone are
timed on a replayed load in virtual time.
"""

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    FinishReason,
    GeneratedText,
    Generation,
    ModelInfo,
    StepResult,
    StoppingParameters,
    Timings,
    Tokens,
    WarmupReply,
    WarmupRequest,
)
from reference_server.router.batching import Batcher
from reference_server.router.request import ValidGenerateRequest
from reference_server.router.scheduler import Decode, Filter, Idle, Prefill, Scheduler, SchedulerOptions

INPUT_TOKENS = 128
BLOCK_SIZE = 16
TOKENS = Tokens((17,), (-0.5,), (" word",), (False,))


class InstantShard:
    """Answers every step at once with the same token for each row; rows end by length."""

    def __init__(self) -> None:
        self._left: dict[int, dict[int, int]] = {}

    async def info(self) -> ModelInfo:
        return ModelInfo(requires_padding=False, dtype="none", device_type="none")

    async def health(self) -> None: ...

    async def warmup(self, request: WarmupRequest) -> WarmupReply:  # noqa: ARG002
        return WarmupReply(None, 0, 0)

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        rows = {request.id: request.stopping.max_new_tokens for request in batch.requests}
        if cached is None:
            return self._step(batch.id, rows)
        return self._step(cached.id, self._left.pop(cached.id) | rows)

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        rows: dict[int, int] = {}
        for batch in batches:
            rows |= self._left.pop(batch.id)
        return self._step(batches[0].id, rows)

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        rows = self._left.pop(batch_id)
        self._left[batch_id] = {request_id: rows[request_id] for request_id in request_ids}
        return self._receipt(batch_id)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        if batch_id is None:
            self._left.clear()
        else:
            self._left.pop(batch_id, None)

    def _step(self, batch_id: int, rows: dict[int, int]) -> StepResult:
        generations, alive = [], False
        for request_id, left in rows.items():
            rows[request_id] = left - 1
            alive = alive or left > 1
            text = None if left > 1 else GeneratedText("text", 1, FinishReason.LENGTH)
            generations.append(Generation(request_id, TOKENS, generated_text=text))
        if not alive:
            return StepResult(tuple(generations), None, Timings())
        self._left[batch_id] = rows
        return StepResult(tuple(generations), self._receipt(batch_id), Timings())

    def _receipt(self, batch_id: int) -> CachedBatch:
        ids = tuple(self._left[batch_id])
        return CachedBatch(batch_id, ids, max_tokens=len(ids) * 256, current_tokens=len(ids))


def make_request(first: int, max_new_tokens: int) -> ValidGenerateRequest:
    return ValidGenerateRequest(
        chunks=("prompt",),
        input_ids=tuple(range(first * INPUT_TOKENS, (first + 1) * INPUT_TOKENS)),
        truncate=INPUT_TOKENS,
        parameters=ChooserParameters(),
        stopping=StoppingParameters(max_new_tokens),
        requested_tokens=max_new_tokens,
    )


def make_scheduler(streams: int, tokens: int) -> Scheduler:
    return Scheduler(
        SchedulerOptions(
            max_batch_prefill_tokens=4096,
            max_batch_total_tokens=(INPUT_TOKENS + tokens + BLOCK_SIZE) * (streams + 1),
            supports_chunking=True,
            use_prefix_caching=True,
            block_size=BLOCK_SIZE,
        )
    )


async def stream_all(streams: int, tokens: int) -> float:
    """µs of CPU per token with every stream read by a task of its own."""
    batcher = Batcher(InstantShard(), make_scheduler(streams, tokens))
    loop = asyncio.create_task(batcher.run())

    async def read(index: int) -> int:
        return sum([1 async for _ in batcher.submit(make_request(index, tokens))])

    start = time.process_time_ns()
    counts = await asyncio.gather(*(read(index) for index in range(streams)))
    spent = time.process_time_ns() - start
    loop.cancel()
    assert sum(counts) == streams * tokens, "every token arrives"
    return spent / sum(counts) / 1000


def drive(streams: int, tokens: int, *, with_scheduler: bool) -> float:
    """µs of CPU per token without an event loop: the Scheduler over the shard, or the shard's part of that alone."""
    shard, scheduler, count, in_shard = InstantShard(), make_scheduler(streams, tokens), 0, 0
    start = time.process_time_ns()
    for index in range(streams):
        scheduler.append(make_request(index, tokens), now_ns=0)
    while not isinstance(call := scheduler.next_call(0), Idle):
        asked = time.process_time_ns()
        match call:
            case Prefill():
                answer = shard.prefill(call.batch, call.cached)
            case Decode():
                answer = shard.decode(call.batches)
            case Filter():
                answer = shard.filter_batch(call.batch_id, call.request_ids)
            case _:
                answer = shard.clear_cache(call.batch_id)
        try:
            answer.send(None)
        except StopIteration as done:
            reply = done.value
        in_shard += time.process_time_ns() - asked
        count += len(scheduler.on_reply(call, reply).generations)
    spent = time.process_time_ns() - start - in_shard
    return (spent if with_scheduler else in_shard) / count / 1000


def measure(streams: int, tokens: int, repeats: int) -> dict[str, float]:
    whole, alone, shard = [], [], []
    for _ in range(repeats):
        whole.append(asyncio.run(stream_all(streams, tokens)))
        alone.append(drive(streams, tokens, with_scheduler=True))
        shard.append(drive(streams, tokens, with_scheduler=False))
    shard_us = statistics.median(shard)
    return {
        "streams": streams,
        "tokens": tokens,
        "scheduler_us_per_token": round(statistics.median(alone), 2),
        "loop_us_per_token": round(statistics.median(whole) - shard_us, 2),
        "loop_us_per_token_min": round(min(whole) - shard_us, 2),
        "loop_us_per_token_max": round(max(whole) - shard_us, 2),
        "shard_us_per_token": round(shard_us, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the result here")
    args = parser.parse_args()
    rows = [measure(streams, args.tokens, args.repeats) for streams in args.streams]
    for row in rows:
        print(
            f"{row['streams']:>5} streams: loop {row['loop_us_per_token']:.2f} µs/token "
            f"({row['loop_us_per_token_min']:.2f}-{row['loop_us_per_token_max']:.2f}, {args.repeats} repeats), "
            f"of that Scheduler {row['scheduler_us_per_token']:.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"python": platform.python_version(), "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
