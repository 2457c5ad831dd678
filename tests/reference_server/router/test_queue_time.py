"""`max_queue_time`: a request that waits too long in the queue is refused; one that runs is not."""

import asyncio

import pytest

from reference_server.errors import OverloadedError
from tests.reference_server.router.test_batching import Gate, Recorder, read, running
from tests.support.wire.scripted_shard import ScriptedShard, say
from tests.support.wire.valid_requests import valid_request

LIMIT_S = 0.2
MESSAGE = "Model is overloaded: the request waited 0.2 s in the queue, the limit of `max_queue_time`"


async def test_a_request_that_waits_longer_than_the_limit_is_refused_and_the_running_one_finishes():
    gate, recorder = Gate("decode"), Recorder()
    # The first request holds all blocks.
    async with running(ScriptedShard(say("a", "b"), gate=gate), observer=recorder, max_batch_total_tokens=64) as (
        batcher,
        scheduler,
        _,
    ):
        first = asyncio.create_task(read(batcher.submit(valid_request(20, 20), LIMIT_S)))
        await gate.reached.wait()
        waiting = batcher.submit(valid_request(20, 20), LIMIT_S)

        with pytest.raises(OverloadedError, match=f"^{MESSAGE}$"):
            await read(waiting)
        assert scheduler.queue_size == 0
        gate.opened.set()
        assert len(await first) == 3

    assert (recorder.counts["overloaded"], recorder.counts["dropped"]) == (1, 0)
    assert recorder.queue[-1] == 0


async def test_a_request_that_left_before_the_limit_is_counted_once():
    gate, recorder = Gate("decode"), Recorder()
    async with running(ScriptedShard(say("a", "b"), gate=gate), observer=recorder, max_batch_total_tokens=64) as (
        batcher,
        _,
        _,
    ):
        first = asyncio.create_task(read(batcher.submit(valid_request(20, 20))))
        await gate.reached.wait()
        batcher.submit(valid_request(20, 20), LIMIT_S).close()
        await asyncio.sleep(2 * LIMIT_S)
        gate.opened.set()
        await first

    assert (recorder.counts["overloaded"], recorder.counts["dropped"]) == (0, 1)


async def test_without_a_limit_a_request_waits():
    gate = Gate("decode")
    async with running(ScriptedShard(say("a", "b"), gate=gate), max_batch_total_tokens=64) as (batcher, _, _):
        first = asyncio.create_task(read(batcher.submit(valid_request(20, 20))))
        await gate.reached.wait()
        second = asyncio.create_task(read(batcher.submit(valid_request(20, 20))))
        await asyncio.sleep(2 * LIMIT_S)
        gate.opened.set()

        assert [len(await each) for each in (first, second)] == [3, 3]
