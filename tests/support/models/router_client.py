"""An HTTP client of a router in this process, over a shard of a small model."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from reference_server.images.reader import ImageReader
from reference_server.router.app import TransportOptions, create_app
from reference_server.router.batching import Batcher
from reference_server.router.infer import Infer, Permits
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions, WireVersion
from reference_server.router.server_info import EngineInfo, ServerInfo
from reference_server.router.services import Services
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.validation.request_rules import GenerationLimits
from reference_server.router.validation.token_limits import ConfiguredLimits, resolve_limits, warmup_request
from reference_server.router.validation.validator import Validator
from reference_server.tokenizer import load_tokenizer
from reference_server.transport.shard import Shard


@asynccontextmanager
async def router_client(
    shard: Shard,
    tokenizer: tuple[Path, int],
    version: str,
    configured: ConfiguredLimits,
    images: ImageReader | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """Warm the shard up and serve it. tokenizer: the directory of its files, and the model's vocabulary size."""
    info = await shard.info()
    limits = resolve_limits(configured, await shard.warmup(warmup_request(configured)), info)
    scheduler = Scheduler(
        SchedulerOptions(
            limits.max_batch_prefill_tokens,
            limits.max_batch_total_tokens,
            waiting_served_ratio=0.3,
            requires_padding=info.requires_padding,
            supports_chunking=info.support_chunking,
            block_size=info.block_size,
            use_prefix_caching=info.use_prefix_caching,
            schema=WireVersion(version),
        )
    )
    request_limits = GenerationLimits(limits.max_input_tokens, limits.max_total_tokens)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    batcher = Batcher(shard, scheduler, observer=metrics)
    engine = EngineInfo(backend="cpu", dtype=info.dtype)
    facts = ServerInfo("tiny", request_limits, version="0.0.0", max_concurrent_requests=8, engine=engine)
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(load_tokenizer(*tokenizer), request_limits, executor, images=images)
        services = Services(Infer(batcher, validator, Permits(8), metrics), metrics, facts, None)
        loop = asyncio.create_task(batcher.run())
        transport = httpx.ASGITransport(app=create_app(services, TransportOptions()))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client
        loop.cancel()
        await asyncio.wait([loop])
