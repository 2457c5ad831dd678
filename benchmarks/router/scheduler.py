"""Cost of the router's scheduling, without HTTP and without a model.

    python benchmarks/router/scheduler.py [--streams 64 512] [--tokens 64] [--repeats 5] [--json PATH]

Three tables:
* streams: µs of process CPU per streamed token of the whole loop (Scheduler, batching, one reader task per stream). The
  scripted shard is measured separately, and its time is subtracted.
* decisions: µs per turn of the Scheduler (`next_call` and `on_reply` of one decode), by the number of running requests
  and of waiting requests that do not fit. The time may grow with the running requests. If it grows with the waiting
  requests, the exit code is 1.
* blocks: allocations per second, and the cost of the prefix trie's operations with 100,000 blocks.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    FinishReason,
    GeneratedText,
    Generation,
    ModelInfo,
    Request,
    StepResult,
    StoppingParameters,
    Timings,
    Tokens,
    WarmupReply,
    WarmupRequest,
)
from reference_server.router.batching import Batcher
from reference_server.router.scheduling.blocks import FreeListAllocator
from reference_server.router.scheduling.calls import Call, Clear, Decode, Filter, Idle, Prefill
from reference_server.router.scheduling.radix import RadixAllocator
from reference_server.router.scheduling.request import ValidGenerateRequest
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions

INPUT_TOKENS = 128
BLOCK_SIZE = 16
TOKENS = Tokens((17,), (-0.5,), (" word",), (False,))


class InstantShard:
    """A shard that returns the same token for each row immediately; rows end by length."""

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
    input_ids = tuple(range(first * INPUT_TOKENS, (first + 1) * INPUT_TOKENS))
    wire = Request(0, ("prompt",), INPUT_TOKENS, ChooserParameters(), StoppingParameters(max_new_tokens))
    return ValidGenerateRequest(wire, input_ids, max_new_tokens)


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
    """µs of CPU per token of the whole loop, with one reader task per stream."""
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
    """µs of CPU per token without an event loop: of the Scheduler, or of the shard."""
    shard, scheduler, count, in_shard = InstantShard(), make_scheduler(streams, tokens), 0, 0
    start = time.process_time_ns()
    for index in range(streams):
        scheduler.append(make_request(index, tokens), now_ns=0)
    while not isinstance(call := scheduler.next_call(0), Idle):
        started_ns = time.process_time_ns()
        reply = _answer(shard, call)
        in_shard += time.process_time_ns() - started_ns
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


POLICIES: dict[str, dict[str, Any]] = {
    "chunked": {"supports_chunking": True, "use_prefix_caching": True},
    "whole": {"use_prefix_caching": True, "waiting_served_ratio": 0.3},
    "put back": {"max_waiting_tokens": 10**9},
}
"""Admission policies and their options. `put back` has space for 32 waiting entries, fewer than the ratio requires, so
every turn admits 32 entries and puts them back."""
RUNNING, WAITING = (1, 64, 512), (0, 1_000, 10_000)
DECODES = 200
PUT_BACK_ROOM = 32
GROWTH_LIMIT, GROWTH_SLACK_US = 1.25, 15.0
"""Allowed growth of a turn with 10,000 waiting entries: for the attempt to admit the first entry, and for noise."""


def decision_us(policy: str, running: int, waiting: int) -> float:
    """Median time of one turn in µs, without the shard."""
    new_tokens = DECODES + 100
    per_request = -(-(INPUT_TOKENS + new_tokens) // BLOCK_SIZE)
    rows = running + (PUT_BACK_ROOM if policy == "put back" else 0)
    options = SchedulerOptions(
        max_batch_prefill_tokens=INPUT_TOKENS * max(running, PUT_BACK_ROOM),
        max_batch_total_tokens=(per_request * rows + 1) * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        **POLICIES[policy]
        | ({"waiting_served_ratio": (PUT_BACK_ROOM + 1.5) / running} if policy == "put back" else {}),
    )
    shard, scheduler = InstantShard(), Scheduler(options)
    for index in range(running):
        scheduler.append(make_request(index, new_tokens), now_ns=0)
    turns = [_turn(shard, scheduler) for _ in range(20)]
    for index in range(waiting):
        scheduler.append(make_request(running + index, new_tokens), now_ns=0)
    turns = [_turn(shard, scheduler) for _ in range(DECODES)]
    assert scheduler.queue_size == waiting, "no waiting entry fits"
    return statistics.median(turns)


def _turn(shard: InstantShard, scheduler: Scheduler) -> float:
    started_ns = time.perf_counter_ns()
    call = scheduler.next_call(0)
    decided = time.perf_counter_ns()
    reply = _answer(shard, call)
    answered = time.perf_counter_ns()
    scheduler.on_reply(call, reply)
    return (decided - started_ns + time.perf_counter_ns() - answered) / 1000


def _answer(shard: InstantShard, call: Call) -> StepResult | CachedBatch | None:
    match call:
        case Prefill():
            answer: Coroutine[Any, Any, Any] = shard.prefill(call.batch, call.cached)
        case Decode():
            answer = shard.decode(call.batches)
        case Filter():
            answer = shard.filter_batch(call.batch_id, call.request_ids)
        case Clear():
            answer = shard.clear_cache(call.batch_id)
        case Idle():
            return None
    try:
        answer.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("an InstantShard never waits")


def measure_decisions() -> list[dict[str, Any]]:
    return [
        {
            "policy": policy,
            "running": running,
            "us_by_waiting": {str(waiting): round(decision_us(policy, running, waiting), 2) for waiting in WAITING},
        }
        for policy in POLICIES
        for running in RUNNING
    ]


def grows(row: dict[str, Any]) -> bool:
    """Whether a turn takes longer with ten times as many waiting entries."""
    some, many = (row["us_by_waiting"][str(waiting)] for waiting in WAITING[1:])
    return bool(many > some * GROWTH_LIMIT + GROWTH_SLACK_US)


def measure_blocks() -> dict[str, float]:
    """Operations of the two allocators, and of the trie at 100,000 blocks."""
    total_tokens, held = 200_000 * BLOCK_SIZE, 8
    free_list, radix = FreeListAllocator(total_tokens, BLOCK_SIZE), RadixAllocator(total_tokens, BLOCK_SIZE)
    keys = [tuple(range(first, first + INPUT_TOKENS)) for first in range(0, 12_500 * INPUT_TOKENS, INPUT_TOKENS)]
    slots = INPUT_TOKENS + 64

    def cycle(allocator: FreeListAllocator | RadixAllocator, key: tuple[int, ...]) -> None:
        allocation = allocator.allocate(slots, key)
        assert allocation is not None
        allocator.free(allocation, is_computed=True)

    fill_us = _each_us(lambda key: cycle(radix, key), keys)
    trie = radix.trie
    assert trie.num_blocks == len(keys) * held == 100_000
    shuffled = random.Random(1).sample(keys, 2000)
    return {
        "free_list_pairs_per_s": round(1e6 / _each_us(lambda key: cycle(free_list, key), keys)),
        "radix_miss_pairs_per_s": round(1e6 / fill_us),
        "radix_hit_pairs_per_s": round(1e6 / _each_us(lambda key: cycle(radix, key), shuffled)),
        "trie_blocks": trie.num_blocks,
        "trie_find_us": round(_each_us(trie.find, shuffled), 2),
        "trie_find_miss_us": round(_each_us(trie.find, [key[::-1] for key in shuffled]), 2),
        "trie_insert_present_us": round(_each_us(lambda key: trie.insert(key, range(held)), shuffled), 2),
        "trie_evict_8_us": round(_each_us(lambda _: trie.evict(held), shuffled), 2),
    }


def _each_us(do: Callable[[tuple[int, ...]], object], keys: Sequence[tuple[int, ...]]) -> float:
    start = time.perf_counter_ns()
    for key in keys:
        do(key)
    return (time.perf_counter_ns() - start) / len(keys) / 1000


def print_tables(rows: list[dict[str, float]], decisions: list[dict[str, Any]], blocks: dict[str, float]) -> None:
    for row in rows:
        print(
            f"{row['streams']:>5} streams: loop {row['loop_us_per_token']:.2f} µs/token "
            f"({row['loop_us_per_token_min']:.2f}-{row['loop_us_per_token_max']:.2f}), "
            f"of that Scheduler {row['scheduler_us_per_token']:.2f}"
        )
    print("\nµs per turn   running " + "".join(f"{waiting:>12,} waiting" for waiting in WAITING))
    for row in decisions:
        costs = "".join(f"{us:>20.1f}" for us in row["us_by_waiting"].values())
        print(f"{row['policy']:<13}{row['running']:>8}{costs}{'   GROWS' if grows(row) else ''}")
    print()
    for name, value in blocks.items():
        print(f"{name:<24}{value:>12,}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file to write the result to")
    args = parser.parse_args()
    rows = [measure(streams, args.tokens, args.repeats) for streams in args.streams]
    decisions, blocks = measure_decisions(), measure_blocks()
    print_tables(rows, decisions, blocks)
    if args.json:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
        content = {**facts, "rows": rows, "decisions": decisions, "blocks": blocks}
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if any(map(grows, decisions)) else 0


if __name__ == "__main__":
    sys.exit(main())
