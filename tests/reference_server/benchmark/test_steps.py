import asyncio
from itertools import count

import pytest

from reference_server.benchmark.steps import BATCH_ID, BatchTimes, StepLoad, time_batch
from reference_server.errors import ShardError
from tests.support.wire.scripted_shard import Reply, ScriptedShard

LOAD = StepLoad("one two three four", 3, 4)


async def test_the_prefill_and_the_decode_steps_of_a_batch_are_timed_apart():
    shard, ticks = ScriptedShard(), count(10.0, 0.5)

    times = await time_batch(shard, LOAD, 2, lambda: next(ticks))

    assert times == BatchTimes(2, 6, 0.5, 0.5, decode_steps=3, decode_tokens=6)
    assert [method for method, _ in shard.calls] == ["prefill", "decode", "decode", "decode"]


async def test_a_step_with_drafts_counts_its_tokens():
    shard = ScriptedShard(lambda _: Reply(tokens_per_step=2))

    times = await time_batch(shard, LOAD, 1)

    assert (times.decode_steps, times.decode_tokens) == (1, 2)


async def test_a_server_that_ends_requests_early_is_refused():
    shard = ScriptedShard(lambda _: Reply(drop_after=2))

    with pytest.raises(ShardError, match="generated 2 tokens for 1 requests of 4"):
        await time_batch(shard, LOAD, 1)


async def test_a_failed_batch_is_removed_from_the_server_and_no_other():
    shard = ScriptedShard(lambda _: Reply(fail_after=2))

    with pytest.raises(ShardError):
        await time_batch(shard, LOAD, 1)

    assert shard.calls[-1] == ("clear_cache", (BATCH_ID,))


async def test_a_cancelled_batch_is_removed_from_the_server():
    shard = ScriptedShard()
    blocked = asyncio.Event()

    async def gate(method: str) -> None:
        if method == "decode":
            blocked.set()
            await asyncio.sleep(3600)

    shard.gate = gate
    running = asyncio.ensure_future(time_batch(shard, LOAD, 1))
    await blocked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert shard.calls[-1] == ("clear_cache", (BATCH_ID,))
