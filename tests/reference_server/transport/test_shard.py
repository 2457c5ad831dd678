import asyncio
import functools
from dataclasses import replace

import pytest

from reference_server.adapter_source import AdapterSource
from reference_server.errors import ShardError
from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    Generation,
    Request,
    StepResult,
    StoppingParameters,
    Timings,
    Tokens,
    WarmupReply,
    WarmupRequest,
)
from reference_server.transport.shard import ShardGroup, lowest_limits, lowest_present_limits, until_loaded
from tests.support.wire.scripted_shard import INFO, ScriptedShard

BATCH = CachedBatch(1, (0, 1, 2, 3), 64, 4)
ADAPTER = AdapterSource("a#1", "/adapters/a")


class Answering(ScriptedShard):
    """Returns the prepared answer of a method, if there is one."""

    def __init__(self, step=None, warmup=None, **options):
        super().__init__(**options)
        self._prepared_step = step
        self._prepared_warmup = warmup

    async def decode(self, batches):
        return self._prepared_step

    async def warmup(self, request):
        return self._prepared_warmup


def step(*request_ids, total_ns=0, batch=BATCH):
    made = tuple(Generation(number, Tokens((5,), (-1.0,), ("a",), (False,))) for number in request_ids)
    return StepResult(made, batch, Timings(total_ns=total_ns))


def request(number):
    return Request(number, ("one two",), 100, ChooserParameters(), StoppingParameters(8))


async def test_generations_are_the_last_ranks_then_the_others():
    group = ShardGroup([Answering(step(0, 3)), Answering(step(1)), Answering(step(2))])

    result = await group.decode([BATCH])

    assert [generation.request_id for generation in result.generations] == [2, 0, 3, 1]
    assert result.batch == BATCH


async def test_timings_are_the_slowest_ranks():
    group = ShardGroup([Answering(step(total_ns=5)), Answering(step(total_ns=9)), Answering(step(total_ns=7))])

    assert (await group.decode([BATCH])).timings.total_ns == 9


async def test_request_answered_twice_is_an_error():
    group = ShardGroup([Answering(step(0, 1)), Answering(step(1))])

    with pytest.raises(ShardError, match="answered by two"):
        await group.decode([BATCH])


@pytest.mark.parametrize("other", [None, replace(BATCH, request_ids=(0, 1, 2)), replace(BATCH, current_tokens=9)])
async def test_receipts_that_differ_are_an_error(other):
    group = ShardGroup([Answering(step(0)), Answering(step(1, batch=other))])

    with pytest.raises(ShardError, match="shards disagree on Decode: rank 1"):
        await group.decode([BATCH])


async def test_models_that_differ_are_an_error():
    group = ShardGroup([ScriptedShard(), ScriptedShard(info=replace(INFO, dtype="torch.bfloat16"))])

    with pytest.raises(ShardError, match="shards disagree on Info"):
        await group.info()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("method", ["info", "health", "clear_cache", "prefill"])
async def test_error_of_any_rank_is_the_groups_and_all_ranks_were_asked(method, failing):
    shards = [ScriptedShard(rank=rank, world_size=2) for rank in range(2)]
    shards[failing].failures[method] = ShardError(f"rank {failing} failed")
    arguments = [Batch(1, ())] if method == "prefill" else []

    with pytest.raises(ShardError, match=f"^rank {failing} failed$"):
        await getattr(ShardGroup(shards), method)(*arguments)

    assert [len(shard.called(method)) for shard in shards] == [1, 1]


@pytest.mark.parametrize("method", ["prefill", "clear_cache"])
async def test_reliability_F2_the_first_error_ends_the_call_while_others_wait_in_a_collective(method):
    async def stuck(_: str) -> None:
        await asyncio.Event().wait()

    shards = [ScriptedShard(gate=stuck, world_size=2), ScriptedShard(rank=1, world_size=2)]
    shards[1].failures[method] = ShardError("rank 1 has gone")
    arguments = [Batch(1, ())] if method == "prefill" else []

    async with asyncio.timeout(10):
        with pytest.raises(ShardError, match=r"^rank 1 has gone$"):
            await getattr(ShardGroup(shards), method)(*arguments)


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_rank_finishes_the_call_that_another_rank_failed_before_it_begins_the_next(failing):
    released = asyncio.Event()

    async def held(method: str) -> None:
        if method == "decode":
            await released.wait()

    shards = [ScriptedShard(gate=None if rank == failing else held, rank=rank, world_size=2) for rank in range(2)]
    group = ShardGroup(shards)
    batch = (await group.prefill(Batch(1, (request(1), request(2))))).batch
    shards[failing].failures["decode"] = ShardError("out of memory")

    async with asyncio.timeout(10):
        with pytest.raises(ShardError, match=r"^out of memory$"):
            await group.decode([batch])
        clearing = asyncio.ensure_future(group.clear_cache(1))
        for _ in range(5):
            await asyncio.sleep(0)
        cleared_early = (shards[failing].called("clear_cache"), shards[1 - failing].called("clear_cache"))
        released.set()
        await clearing

    assert cleared_early == ([(1,)], [])
    assert [name for name, _ in shards[1 - failing].calls] == ["prefill", "decode", "clear_cache"]
    assert [shard.cached_ids for shard in shards] == [{}, {}]


async def test_a_closed_group_ends_the_calls_that_are_unfinished():
    ended = []

    async def stuck(_: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(True)
            raise

    shards = [ScriptedShard(), ScriptedShard(gate=stuck, rank=1)]
    shards[0].failures["health"] = ShardError("rank 0 has gone")
    group = ShardGroup(shards)

    with pytest.raises(ShardError, match="rank 0 has gone"):
        await group.health()
    await group.close()
    await asyncio.sleep(0)

    assert ended == [True]


async def test_warmup_takes_the_lowest_limits_and_the_largest_bytes():
    replies = [
        WarmupReply(4096, 1000, 2000, weight_bytes=10, prefill_peak_bytes=7, backends={"prefill": "torch"}),
        WarmupReply(2048, 1500, 1800, weight_bytes=12, prefill_peak_bytes=5, backends={"prefill": "other"}),
    ]
    group = ShardGroup([Answering(warmup=reply) for reply in replies])

    assert await group.warmup(WarmupRequest(Batch(0, ()), 512)) == WarmupReply(
        2048, 1500, 1800, weight_bytes=12, prefill_peak_bytes=7, backends={"prefill": "torch"}
    )


def test_absent_limit_is_the_lowest_under_v3_and_ignored_under_v2():
    unknown, known = WarmupReply(None, 10, 20), WarmupReply(4096, 10, 20)

    assert lowest_limits([known, unknown]) is unknown
    assert lowest_present_limits([known, unknown]) is known
    assert lowest_present_limits([unknown, unknown]) is unknown


async def test_closing_a_group_calls_its_close_function_once():
    closed = []

    async def close():
        closed.append(True)

    await ShardGroup([ScriptedShard()], close=close).close()
    await ShardGroup([ScriptedShard()]).close()

    assert closed == [True]


async def test_an_adapter_is_loaded_once_all_ranks_have_read_it():
    quick, slow = ScriptedShard(), ScriptedShard()
    slow.reads = 2
    group = ShardGroup([quick, slow])

    first = await group.load_adapter(ADAPTER)
    nbytes = await until_loaded(functools.partial(group.load_adapter, ADAPTER))

    assert (first, nbytes) == (None, 1000)
    assert quick.called("load_adapter") == slow.called("load_adapter") == [(ADAPTER,)] * 3


async def test_an_adapter_that_one_rank_refuses_is_on_none():
    taking, reading, refusing = ScriptedShard(), ScriptedShard(), ScriptedShard()
    reading.reads = 5
    refusing.failures["load_adapter"] = ShardError("`use_dora` True is not served")

    with pytest.raises(ShardError, match="use_dora"):
        await ShardGroup([taking, reading, refusing]).load_adapter(ADAPTER)

    unloaded = [shard.called("unload_adapter") for shard in (taking, reading, refusing)]
    assert unloaded == [[("a#1",)], [("a#1",)], []]


async def test_a_group_has_the_adapters_that_all_ranks_have():
    infos = [replace(INFO, adapters=names) for names in (("a", "b", "c"), ("c", "a"))]

    info = await ShardGroup([ScriptedShard(info=each) for each in infos]).info()

    assert info.adapters == ("a", "c")
