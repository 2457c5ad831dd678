"""The conformance suite of `Shard`, run against every implementation."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from reference_server.configuration.common_config import Transport
from reference_server.errors import ShardError
from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    FinishReason,
    Generation,
    Request,
    StepResult,
    StoppingParameters,
    WarmupRequest,
)
from reference_server.transport.shard import Shard, ShardGroup
from tests.support.wire.scripted_shard import EOS_ID, INFO, Reply, ScriptedShard
from tests.support.wire.wire_shard import served, socket_urls, tcp_urls


@dataclass(frozen=True)
class Way:
    """How the shards are reached: over `address` (none: in process) by `transport`, speaking `version`."""

    address: str | None = None
    version: str = "v3"
    world_size: int = 1
    transport: Transport = "grpc"

    def __str__(self):
        where = "local" if self.address is None else f"{self.address}-{self.transport}"
        return f"{where}-{self.version}-{self.world_size}"


WAYS = [
    Way(),
    Way(world_size=2),
    *(Way(address, version, size) for address in ("unix", "tcp") for version in ("v3", "v2") for size in (1, 2)),
    *(Way("unix", "v3", size, "link") for size in (1, 2)),
]


@pytest.fixture(params=WAYS, ids=str)
def way(request):
    return request.param


@pytest.fixture
async def shard(way, tmp_path):
    shards = [ScriptedShard(script, rank=rank, world_size=way.world_size) for rank in range(way.world_size)]
    if way.address is None:
        yield ShardGroup(shards)
        return
    urls = socket_urls(tmp_path, len(shards)) if way.address == "unix" else tcp_urls(len(shards))
    async with served(shards, urls, way.version, way.transport) as group:
        yield group


def script(request: Request) -> Reply:
    if request.text.startswith("fail"):
        return Reply(("a", "b", "c"), fail_after=2)
    return Reply(("a", "b", "c"))


def request(number: int, text: str = "one two three", max_new_tokens: int = 8, **values: object) -> Request:
    return Request(number, (text,), 100, ChooserParameters(), StoppingParameters(max_new_tokens), **values)


def ids(generations: Sequence[Generation]) -> list[int]:
    return sorted(generation.request_id for generation in generations)


def ended(result: StepResult) -> dict[int, tuple[str, FinishReason]]:
    return {
        generation.request_id: (generation.generated_text.text, generation.generated_text.finish_reason)
        for generation in result.generations
        if generation.generated_text is not None
    }


def receipt(result: StepResult) -> CachedBatch:
    assert result.batch is not None
    return result.batch


async def test_info_is_the_models(shard: Shard, way):
    info = await shard.info()

    assert (info.dtype, info.device_type, info.requires_padding) == (INFO.dtype, INFO.device_type, False)
    assert info.support_chunking == (way.version == "v3")


async def test_health_answers(shard: Shard):
    await shard.health()


async def test_warmup_returns_the_tokens_that_fit(shard: Shard):
    reply = await shard.warmup(WarmupRequest(Batch(0, (request(0),)), 512, max_input_tokens=100, max_total_tokens=200))

    assert (reply.max_supported_total_tokens, reply.max_input_tokens, reply.max_total_tokens) == (4096, 100, 200)
    assert reply.weight_bytes == 1000
    assert reply.backends == {"prefill": "scripted", "decode": "scripted"}


async def test_requests_generate_until_they_end(shard: Shard):
    result = await shard.prefill(Batch(1, (request(1), request(2, max_new_tokens=2), request(3))))
    first = result
    second = await shard.decode([receipt(first)])
    rest = await shard.filter_batch(1, [1, 3])
    third = await shard.decode([rest])
    fourth = await shard.decode([receipt(third)])

    assert receipt(first).request_ids == (1, 2, 3)
    assert ids(first.generations) == [1, 2, 3]
    assert ended(first) == {}
    assert ended(second) == {2: ("ab", FinishReason.LENGTH)}
    assert receipt(second).request_ids == (1, 2, 3)
    assert ended(fourth) == {1: ("abc", FinishReason.EOS_TOKEN), 3: ("abc", FinishReason.EOS_TOKEN)}
    assert fourth.generations[0].tokens.ids == (EOS_ID,)
    assert fourth.generations[0].tokens.is_special == (True,)
    assert fourth.batch is None


async def test_merged_batches_keep_the_first_id(shard: Shard):
    first = await shard.prefill(Batch(1, (request(1),)))
    second = await shard.prefill(Batch(2, (request(2),)))

    merged = await shard.decode([receipt(first), receipt(second)])

    assert receipt(merged).id == 1
    assert receipt(merged).request_ids == (1, 2)
    assert merged.timings.concat_ns is not None


async def test_filtering_to_everything_changes_nothing(shard: Shard):
    before = receipt(await shard.prefill(Batch(1, (request(1), request(2)))))

    assert await shard.filter_batch(1, [1, 2]) == before


async def test_filtering_to_nothing_is_an_error(shard: Shard):
    await shard.prefill(Batch(1, (request(1),)))

    with pytest.raises(ShardError, match="at least one request"):
        await shard.filter_batch(1, [])


async def test_model_server_M19_unknown_batch_is_an_error_and_the_shard_lives(shard: Shard):
    with pytest.raises(ShardError, match=r"^Batch ID 99 not found in cache\.$"):
        await shard.filter_batch(99, [1])

    await shard.health()


async def test_decoding_nothing_is_an_error(shard: Shard):
    with pytest.raises(ShardError, match="Must provide at least one batch"):
        await shard.decode([])


async def test_failed_step_leaves_nothing_behind(shard: Shard):
    batch = receipt(await shard.prefill(Batch(1, (request(1, "fail"), request(2)))))
    batch = receipt(await shard.decode([batch]))

    with pytest.raises(ShardError, match="request 1 was scripted to fail"):
        await shard.decode([batch])
    with pytest.raises(ShardError, match="Batch ID 1 not found"):
        await shard.decode([batch])


@pytest.mark.parametrize("batch_id", [1, None])
async def test_cleared_batch_is_forgotten(shard: Shard, batch_id):
    batch = receipt(await shard.prefill(Batch(1, (request(1),))))

    await shard.clear_cache(batch_id)
    await shard.clear_cache(77)

    with pytest.raises(ShardError, match="Batch ID 1 not found"):
        await shard.decode([batch])


async def test_prompt_is_prefilled_in_chunks_beside_running_requests(shard: Shard, way):
    if way.version == "v2":
        pytest.skip("v2 has no chunked prefill")
    await shard.info()
    running = receipt(await shard.prefill(Batch(1, (placed(1, prompt_len=3),))))

    joined = await shard.prefill(Batch(2, (placed(2, prompt_len=20, chunk_len=5),)), running)
    finished = await shard.decode([receipt(joined)])

    assert receipt(joined).id == 1
    assert ids(joined.generations) == [1]
    assert receipt(joined).current_tokens == 1 + 15
    assert ids(finished.generations) == [1, 2]
    assert receipt(finished).current_tokens == 2


async def test_liveness_probe_leaves_nothing_cached(shard: Shard):
    largest = 2**64 - 1
    probe = Request(
        largest, ("liveness",), 1, ChooserParameters(), StoppingParameters(1), blocks=(0,), num_slots=1,
        add_special_tokens=False,
    )  # fmt: skip

    result = await shard.prefill(Batch(largest, (probe,), max_tokens=2, max_blocks=1))

    assert ids(result.generations) == [largest]
    assert result.batch is None


def placed(number: int, prompt_len: int, **values: object) -> Request:
    """A request whose K/V has been placed, as the router does under v3."""
    num_slots = prompt_len + 8 - 1
    blocks = tuple(range(1, 2 + num_slots // INFO.block_size))
    return request(number, blocks=blocks, num_slots=num_slots, **values)
