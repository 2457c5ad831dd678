"""A long run of mixed requests over a real model: memory, blocks and answers do not change.

Forty seconds in the long tests and thirty in `make soak`; the environment variable `SOAK_SECONDS` sets another length.
"""

import asyncio
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from reference_server.router.infer import Infer
from reference_server.router.scheduling.admission import PagedAdmission
from reference_server.router.scheduling.radix import RadixAllocator
from tests.support.clients.mixed_load import MODEL, Router, answers, mixed_calls, router_over

SOAK_S = float(os.environ.get("SOAK_SECONDS", "40"))
AT_ONCE = 8
NUM_LEAVING = 10
# Linux commits the memory of a K/V block when it is first written, so a large cache grows with the most blocks that
# were held at once until then. This one is full after the first round.
KV_CACHE_GIB = 0.01
# Python and torch keep memory that they once took; after the first fifth of the run it may grow by no more than this.
ALLOWED_GROWTH_BYTES = 8 << 20


@dataclass(frozen=True)
class Reading:
    """The state of the idle server between two rounds."""

    resident_bytes: int
    free_and_cached_blocks: int
    tasks: int


@pytest.fixture
def shard() -> Iterator[LocalShard]:
    options = EngineOptions(MODEL, dtype="float32", cpu_memory_gib=KV_CACHE_GIB, compute_threads=1, prefix_caching=True)
    shard = LocalShard.load(options)
    yield shard
    shard.close()


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
async def test_memory_and_blocks_stay_flat_and_answers_the_same(shard: LocalShard) -> None:
    calls = mixed_calls(60)
    chance = random.Random(3)
    readings: list[Reading] = []

    async with router_over(shard) as router:
        end = time.monotonic() + SOAK_S
        first = await answers(router, calls, AT_ONCE)
        while time.monotonic() < end:
            order = chance.sample(range(len(calls)), len(calls))
            again, _ = await asyncio.gather(
                answers(router, [calls[place] for place in order], AT_ONCE), leave(router.infer)
            )
            assert again == [first[place] for place in order]
            readings.append(await read_when_idle(allocator_of(router)))

    print(f"{len(readings)} rounds; resident MiB: {[reading.resident_bytes >> 20 for reading in readings]}")
    assert {reading.free_and_cached_blocks for reading in readings} == {allocator_of(router).capacity}
    assert len({reading.tasks for reading in readings}) == 1
    fifth = max(1, len(readings) // 5)
    early = median(reading.resident_bytes for reading in readings[fifth : 2 * fifth])
    late = median(reading.resident_bytes for reading in readings[-fifth:])
    assert late - early <= ALLOWED_GROWTH_BYTES


async def leave(infer: Infer) -> None:
    """Clients that disconnect while they wait, during their answer, or at its end."""
    for number, call in enumerate(mixed_calls(NUM_LEAVING)):
        task = asyncio.create_task(infer.generate(call))
        await asyncio.sleep(0.01 * number)
        task.cancel()
        await asyncio.wait([task])


async def read_when_idle(allocator: RadixAllocator) -> Reading:
    async with asyncio.timeout(60):
        while len(allocator.free_blocks) + allocator.trie.num_blocks < allocator.capacity:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # tasks of clients that left end
    return Reading(
        resident_bytes=resident_bytes(),
        free_and_cached_blocks=len(allocator.free_blocks) + allocator.trie.num_blocks,
        tasks=len(asyncio.all_tasks()),
    )


def resident_bytes() -> int:
    """Anonymous resident memory; pages of files depend on the load of the machine."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split(maxsplit=1)[0])


def allocator_of(router: Router) -> RadixAllocator:
    admission = router.scheduler.queue.admission
    assert isinstance(admission, PagedAdmission)
    assert isinstance(admission.allocator, RadixAllocator)
    return admission.allocator
