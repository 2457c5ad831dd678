"""Spans of a rank's steps, around the calls of a scripted shard."""

import asyncio
from collections import Counter

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from reference_server.messages import Batch, CachedBatch, ChooserParameters, Request, StepResult, StoppingParameters
from reference_server.model_server.calls.traced_calls import StepTracing, TracedCalls
from reference_server.transport.shard import BlockingShard
from tests.support.wire.blocking_shard import BlockingTestShard
from tests.support.wire.scripted_shard import Reply, ScriptedShard

PARENT = f"00-{0xAA:032x}-{0xBB:016x}-01"
NOT_RECORDED = PARENT[:-1] + "0"


def request(id_: int, traceparent: str | None = PARENT, tokens: int = 40) -> Request:
    return Request(
        id_, ("a prompt",), 8, ChooserParameters(), StoppingParameters(max_new_tokens=tokens), traceparent=traceparent
    )


class Rank:
    """A traced rank and its spans; its calls are made outside of the event loop."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self._exporter = InMemorySpanExporter()
        self._tracing = StepTracing("a-shard", self._exporter)
        shard = ScriptedShard(lambda _: Reply((" x",) * 100), rank=rank, world_size=world_size)
        blocking: BlockingShard = BlockingTestShard(shard, asyncio.get_running_loop())
        self.calls: TracedCalls = self._tracing.traced(rank, world_size, blocking)

    async def prefill(self, *requests: Request) -> CachedBatch:
        return batch_of(await asyncio.to_thread(self.calls.prefill, Batch(1, requests)))

    async def decode(self, batch: CachedBatch, times: int = 1) -> CachedBatch:
        for _ in range(times):
            batch = batch_of(await asyncio.to_thread(self.calls.decode, [batch]))
        return batch

    def spans(self) -> list[ReadableSpan]:
        self._tracing.flush()
        return list(self._exporter.get_finished_spans())


def batch_of(result: StepResult) -> CachedBatch:
    assert result.batch is not None
    return result.batch


async def test_the_steps_of_a_traced_request_are_below_the_span_of_the_router():
    rank = Rank()

    await rank.decode(await rank.prefill(request(1)), times=2)

    spans = rank.spans()
    assert [span.name for span in spans] == ["prefill", "decode", "decode"]
    assert {(span.context.trace_id, span.parent.span_id) for span in spans if span.parent} == {(0xAA, 0xBB)}
    assert [dict(span.attributes or {}).get("step") for span in spans] == [None, 1, 2]
    assert {dict(span.attributes or {})["tokens"] for span in spans} == {1}
    assert all(span.end_time and span.start_time and span.end_time >= span.start_time for span in spans)


async def test_after_the_first_decode_steps_each_sixteenth_has_a_span():
    rank = Rank()

    await rank.decode(await rank.prefill(request(1, tokens=64)), times=33)

    steps = [dict(span.attributes or {}).get("step") for span in rank.spans()]
    assert steps == [None, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32]


@pytest.mark.parametrize("traceparent", [None, "nonsense", NOT_RECORDED])
async def test_a_request_whose_trace_is_not_recorded_has_no_span(traceparent: str | None):
    rank = Rank()

    await rank.decode(await rank.prefill(request(1, traceparent), request(2)))

    assert [(span.name, span.parent and span.parent.span_id) for span in rank.spans()] == [
        ("prefill", 0xBB),
        ("decode", 0xBB),
    ]


async def test_a_request_that_left_its_batch_has_no_more_spans():
    rank = Rank()
    batch = await rank.prefill(request(1), request(2))

    kept = await asyncio.to_thread(rank.calls.filter_batch, batch.id, [2])
    await rank.decode(kept)

    assert Counter(span.name for span in rank.spans()) == {"prefill": 2, "decode": 1}


async def test_every_rank_has_spans_of_a_request_that_another_one_answers():
    rank = Rank(rank=1, world_size=2)

    await rank.decode(await rank.prefill(request(2)))

    spans = rank.spans()
    assert [span.name for span in spans] == ["prefill", "decode"]
    assert [dict(span.attributes or {})["shard.rank"] for span in spans] == [1, 1]
    assert [dict(span.attributes or {})["tokens"] for span in spans] == [0, 0]
