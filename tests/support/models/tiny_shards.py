"""Shards of tiny models in this process, warmed up like by the router."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from reference_server.messages import (
    Batch,
    ChooserParameters,
    Request,
    StoppingParameters,
    WarmupReply,
    WarmupRequest,
)
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from tests.support.models.tiny_models import text_of

SEEDED = ChooserParameters(temperature=0.8, top_k=20, top_p=0.9, seed=42)


def loaded(directory: Path, **options: object) -> Iterator[LocalShard]:
    shard = LocalShard.load(tiny_options(directory, **options))
    yield shard
    shard.close()


def tiny_options(directory: Path, **changes: object) -> EngineOptions:
    options = EngineOptions(
        str(directory), dtype="float32", cpu_memory_gib=0.01, compute_threads=1, request_logprobs=True
    )
    return replace(options, **changes)  # type: ignore[arg-type]


async def warm_up(shard: LocalShard, max_prefill_tokens: int = 64, **limits: int) -> WarmupReply:
    request = Request(0, (text_of([1] * max_prefill_tokens),), max_prefill_tokens, SEEDED, StoppingParameters(1))
    return await shard.warmup(WarmupRequest(Batch(0, (request,)), max_prefill_tokens, **limits))
