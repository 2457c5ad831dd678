"""A real model at the other end of the wire, under both schemas: same ids as Transformers gives each prompt alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reference_server.configuration.common_config import Transport
from reference_server.errors import ShardError
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import generate_alone, make_tiny_model, random_prompt, save_tiny_model, text_of
from tests.support.wire.wire_shard import served, socket_urls

PROMPTS = [random_prompt(length) for length in (4, 20, 17)]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalShard]:
    directory = save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")
    shard = LocalShard.load(EngineOptions(str(directory), dtype="float32", cpu_memory_gib=0.01, compute_threads=1))
    yield shard
    shard.close()


def warmup_request() -> WarmupRequest:
    prompt = Request(0, (text_of([1] * 64),), 64, ChooserParameters(), StoppingParameters(1))
    return WarmupRequest(Batch(0, (prompt,)), 64, max_input_tokens=48, max_total_tokens=64)


@pytest.mark.parametrize(("version", "transport"), [("v3", "grpc"), ("v2", "grpc"), ("v3", "link")])
async def test_batches_that_run_side_by_side_keep_their_blocks_apart(
    local: LocalShard, tmp_path: Path, version: str, transport: Transport
):
    model = make_tiny_model("llama")

    async with served([local], socket_urls(tmp_path), version, transport) as group:
        await group.info()
        await group.warmup(warmup_request())
        driver = ShardDriver(group)
        first = await driver.prefill(driver.request(1, PROMPTS[0]), driver.request(2, PROMPTS[1], 3))
        second = await driver.prefill(driver.request(3, PROMPTS[2]))
        merged = await driver.decode(first.batch, second.batch)
        merged = await driver.decode(merged.batch)
        kept = await driver.drop_ended(merged.batch)
        third = await driver.prefill(driver.request(4, PROMPTS[1]))
        await driver.finish(await driver.decode(kept, third.batch))

    assert [driver.outcomes[id_].ids for id_ in (1, 2, 3, 4)] == [
        generate_alone(model, PROMPTS[0], 10),
        generate_alone(model, PROMPTS[1], 3),
        generate_alone(model, PROMPTS[2], 10),
        generate_alone(model, PROMPTS[1], 10),
    ]


async def test_a_shard_that_places_itself_reports_that_no_block_is_free(local: LocalShard):
    reply = await local.warmup(warmup_request())
    assert reply.max_supported_total_tokens is not None
    blocks = reply.max_supported_total_tokens // 16
    request = Request(1, ("a b",), 8, ChooserParameters(), StoppingParameters(blocks * 16))

    with pytest.raises(ShardError, match="blocks"):
        await local.prefill(Batch(1, (request,)))
