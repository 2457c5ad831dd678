import asyncio

import pytest

from reference_server.errors import ShardError, StepTimeoutError
from reference_server.messages import CachedBatch
from reference_server.router.timed_shard import TimedShard
from reference_server.router.validation.token_limits import ConfiguredLimits, warmup_request
from tests.support.wire.scripted_shard import ScriptedShard


async def hang(method: str) -> None:
    if method in ("decode", "warmup"):
        await asyncio.sleep(0.05)


async def test_a_step_that_takes_too_long_is_a_shard_error():
    shard = TimedShard(ScriptedShard(gate=hang), timeout_s=0.001)

    with pytest.raises(ShardError, match=r"step timed out after 0\.001 s"):
        await shard.decode([CachedBatch(0, (0,), 8)])


async def test_warm_up_has_no_limit():
    shard = TimedShard(ScriptedShard(gate=hang), timeout_s=0.001)
    reply = await shard.warmup(warmup_request(ConfiguredLimits(16)))

    assert reply.max_total_tokens == 2048


# Three calls of `health` together exceed the limit. One leaves 0.25 s to a busy machine.
LIMIT_S = 0.4


async def pause(method: str) -> None:
    await asyncio.sleep({"health": 0.15, "decode": 30.0}.get(method, 0))


async def test_each_call_has_the_whole_time():
    shard = TimedShard(ScriptedShard(gate=pause), timeout_s=LIMIT_S)

    for _ in range(3):
        await shard.health()


async def test_a_call_that_hangs_after_others_ends_at_its_own_limit():
    loop = asyncio.get_running_loop()
    shard = TimedShard(ScriptedShard(gate=pause), timeout_s=LIMIT_S)
    await shard.health()
    began_s = loop.time()

    with pytest.raises(StepTimeoutError):
        await shard.decode([CachedBatch(0, (0,), 8)])

    assert 0.9 * LIMIT_S < loop.time() - began_s < 5
    await shard.health()


async def test_a_timer_that_is_due_between_two_calls_ends_none():
    shard = TimedShard(ScriptedShard(gate=pause), timeout_s=LIMIT_S)
    await shard.info()
    await asyncio.sleep(1.2 * LIMIT_S)

    await shard.health()


async def test_a_cancelled_caller_is_no_timeout():
    shard = TimedShard(ScriptedShard(gate=pause), timeout_s=30.0)
    task = asyncio.create_task(shard.decode([CachedBatch(0, (0,), 8)]))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()
