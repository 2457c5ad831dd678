"""GPU memory: a process respects its fraction; an out-of-memory error names the flag, and the shard recovers."""

import pytest
import torch

from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.device import DeviceMemory
from reference_server.model_server.options import WIGGLE_ROOM
from tests.gpu.conftest import MEMORY_FRACTION
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import random_prompt
from tests.support.models.tiny_shards import warm_up

pytestmark = pytest.mark.gpu


def allow(extra_bytes: int) -> None:
    """Limit this process to `extra_bytes` more than it has allocated."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra_bytes) / total)


async def test_the_cache_fills_the_memory_fraction(plain: LocalShard, gpu: torch.device) -> None:
    reply = await warm_up(plain)

    memory, cache = DeviceMemory.of(gpu), plain.engine.state.cache
    assert cache is not None
    assert reply.max_supported_total_tokens == cache.num_slots
    assert torch.cuda.memory_reserved(gpu) <= MEMORY_FRACTION * memory.total_bytes
    # The reserve is free, and no further block would fit.
    kept_free = (1 - MEMORY_FRACTION * WIGGLE_ROOM) * memory.total_bytes
    block_bytes = sum(layer.buffer[0].nbytes for layer in cache.layers)
    assert memory.free_bytes == pytest.approx(kept_free, abs=max(256 << 20, 2 * block_bytes))


async def test_reliability_F4_warm_up_without_memory_names_the_flag_and_can_be_tried_again(plain: LocalShard) -> None:
    # Their logits exceed the allocator's unused memory.
    too_many = 8192
    allow(0)
    with pytest.raises(RuntimeError, match=r"8192 prefill tokens.*`--max-batch-prefill-tokens`: .*out of memory"):
        await warm_up(plain, too_many)

    torch.cuda.set_per_process_memory_fraction(MEMORY_FRACTION)
    await warm_up(plain, 64)
    driver = ShardDriver(plain)
    assert len((await driver.run(driver.request(1, random_prompt(9), 6)))[0].ids) == 6


async def test_reliability_F5_a_step_without_memory_is_fatal_for_the_shard(plain: LocalShard) -> None:
    await warm_up(plain, 64)
    driver = ShardDriver(plain, num_blocks=4096)
    requests = [driver.request(id_, random_prompt(5000, seed=id_), 2, prefill_logprobs=True) for id_ in range(4)]
    allow(0)

    with pytest.raises(torch.OutOfMemoryError):
        await driver.prefill(*requests)
