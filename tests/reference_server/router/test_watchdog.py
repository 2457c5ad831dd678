import asyncio

import pytest

from reference_server.errors import ShardError
from reference_server.messages import CachedBatch, WarmupRequest
from reference_server.router.warmup import AskedLimits, warmup_request
from reference_server.router.watchdog import TimedShard, step_timeout_s
from tests.support.scripted_shard import ScriptedShard


async def hang(method: str) -> None:
    if method in ("decode", "warmup"):
        await asyncio.sleep(0.05)


async def test_a_step_that_takes_too_long_is_a_shard_error():
    shard = TimedShard(ScriptedShard(gate=hang), timeout_s=0.001)

    with pytest.raises(ShardError, match=r"step timed out after 0\.001 s"):
        await shard.decode([CachedBatch(0, (0,), 8)])


async def test_warm_up_has_no_limit():
    shard = TimedShard(ScriptedShard(gate=hang), timeout_s=0.001)
    request: WarmupRequest = warmup_request(AskedLimits(16))

    assert (await shard.warmup(request)).max_total_tokens == 2048


@pytest.mark.parametrize(("asked", "device", "limit"), [(None, "cpu", 600.0), (None, "cuda", 120.0), (5.0, "cpu", 5.0)])
def test_the_default_depends_on_the_device(asked: float | None, device: str, limit: float):
    assert step_timeout_s(asked, device) == limit
