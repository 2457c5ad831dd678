"""A model that pads, over both transports and schemas: the router budgets rows times the longest prompt."""

import asyncio
from pathlib import Path

import pytest

from reference_server.configuration.common_config import Transport
from reference_server.messages import ModelInfo
from reference_server.router.batching import Batcher
from reference_server.router.generation_stream import Finished
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions, WireVersion
from reference_server.router.validation.token_limits import ConfiguredLimits, resolve_limits, warmup_request
from tests.support.wire.scripted_shard import Reply, ScriptedShard
from tests.support.wire.valid_requests import valid_request
from tests.support.wire.wire_shard import served, socket_urls

PADDED = ModelInfo(requires_padding=True, dtype="torch.float32", device_type="cpu")


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize(("version", "transport"), [("v3", "grpc"), ("v2", "grpc"), ("v3", "link")])
async def test_padded_models_are_served_through_either_schema_and_transport(
    tmp_path: Path, version: str, transport: Transport, num_shards: int
):
    shards = [
        ScriptedShard(
            lambda request: Reply(tuple(f"{request.text}:{i}" for i in range(3))),
            info=PADDED,
            max_supported_total_tokens=None,
            rank=rank,
            world_size=num_shards,
        )
        for rank in range(num_shards)
    ]
    async with served(shards, socket_urls(tmp_path, num_shards), version, transport) as group:
        info = await group.info()
        asked = ConfiguredLimits(64, 63, 256, max_batch_total_tokens=256)
        limits = resolve_limits(asked, await group.warmup(warmup_request(asked)), info)
        options = SchedulerOptions(
            limits.max_batch_prefill_tokens,
            limits.max_batch_total_tokens,
            waiting_served_ratio=0.3,
            requires_padding=info.requires_padding,
            block_size=info.block_size,
            schema=WireVersion(version),
        )
        batcher = Batcher(group, Scheduler(options))
        loop = asyncio.create_task(batcher.run())

        async def read(number: int) -> list[str]:
            stream = batcher.submit(valid_request(5 + number, 8, chunks=(f"p{number}",)))
            events = [event async for event in stream]
            assert isinstance(events[-1], Finished)
            return [event.token.text for event in events]  # type: ignore[union-attr]

        texts = await asyncio.gather(*map(read, range(12)))
        loop.cancel()
        await asyncio.wait([loop])

    assert texts == [[*(f"p{number}:{i}" for i in range(3)), "</s>"] for number in range(12)]
    for shard in shards:
        batches = [batch for batch, cached in shard.called("prefill") if cached is None]  # type: ignore[attr-defined]
        assert sum(len(batch.requests) for batch in batches) == 12
        assert all(request.blocks == () for batch in batches for request in batch.requests)
        lengths = [[5 + int(request.text[1:]) for request in batch.requests] for batch in batches]
        assert all(len(rows) * max(rows) <= 64 for rows in lengths)
