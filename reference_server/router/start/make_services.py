"""Makes the services of the routes: tokenizer, templates, grammars, images, batcher and metrics."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from reference_server.configuration.config import RouterConfig
from reference_server.errors import ArgumentError
from reference_server.images.fetch import ImageFetcher
from reference_server.images.placeholder import VisionConfig, placeholder_of
from reference_server.images.reader import ImageReader, worker_pool
from reference_server.router.batching import Batcher
from reference_server.router.chat.prompts import TemplateSource
from reference_server.router.chat.rendering_pool import RenderingPool
from reference_server.router.grammar_compiler import make_compiler
from reference_server.router.infer import Infer, Permits
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.served_adapters import AdapterRules, Adapters
from reference_server.router.server_info import ServerInfo
from reference_server.router.services import Services
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.telemetry.step_trace import StepTrace
from reference_server.router.timed_shard import TimedShard
from reference_server.router.tokenizer_files import TokenizerFiles
from reference_server.router.validation.validator import Validator
from reference_server.tokenizer import SlowTokenizer, Tokenizer

logger = logging.getLogger(__name__)

#: Template jobs that may wait beyond those of requests with a permit.
EXTRA_WAITING = 64


async def make_services(
    config: RouterConfig,
    files: TokenizerFiles,
    info: ServerInfo,
    shard: TimedShard,
    options: SchedulerOptions,
    accepts_schemas: bool,
    warm_up: Callable[[], Awaitable[None]],
    held: AsyncExitStack,
) -> Services:
    tokenizer = await asyncio.to_thread(files.load_tokenizer, config.trust_remote_code)
    source = await asyncio.to_thread(files.load_template, config.tokenizer_config_path)
    rendering = None if source is None else await _start_rendering(source, config, held)
    workers = 1 if isinstance(tokenizer, SlowTokenizer) else config.validation_workers
    executor = held.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="validation"))
    metrics = Metrics(info.limits.max_input_tokens, info.limits.max_total_tokens)
    metrics.batch_max_total_tokens.set(options.max_batch_total_tokens)
    trace = None if config.step_trace is None else _open_trace(config.step_trace, info, options, held)
    batcher = Batcher(
        shard,
        Scheduler(options),
        observer=metrics,
        trace=trace,
        warm_up=warm_up,
        turns_to_send=shard.turns_to_send,
    )
    model_type = files.read_json("config.json").get("model_type")
    grammars = make_compiler(config.disable_grammar_support, tokenizer, accepts_schemas)
    if grammars is not None:
        held.push_async_callback(grammars.close)
        grammars.start()
    compile_grammar = None if grammars is None else grammars.compile
    images = image_reader(config, files, tokenizer)
    if images is not None:
        held.push_async_callback(images.close)
        await images.start()
    validator = Validator(
        tokenizer, info.limits, executor, model_type=model_type, compile_grammar=compile_grammar, images=images
    )
    # A tokenizer's first call builds its tables; do it before a client waits for it.
    await validator.encode("warm-up", add_special_tokens=True)
    permits = Permits(config.max_concurrent_requests, config.max_requests_per_client)
    rules = AdapterRules(info.model_id, config.adapter_directory, config.adapter_fallback, config.max_adapters)
    adapters = Adapters(options.adapters, rules, batcher, metrics)
    infer = Infer(batcher, validator, permits, metrics, config.max_queue_time, adapters)
    return Services(infer, metrics, info, None if rendering is None else rendering.render)


def image_reader(config: RouterConfig, files: TokenizerFiles, tokenizer: Tokenizer) -> ImageReader | None:
    """Reads the images of prompts; None for a model that takes none."""
    placeholder = placeholder_of(VisionConfig.read(files.read_json))
    if placeholder is None:
        if config.allow_image_fetch:
            logger.warning("`--allow-image-fetch` has no effect: %s takes no images", files.model_id)
        return None
    ids = tokenizer.encode(placeholder.token, add_special_tokens=False)
    if len(ids) != 1:
        logger.warning("images are refused: the tokenizer has no token %r", placeholder.token)
        return None
    fetcher = None
    if config.allow_image_fetch:
        fetcher = ImageFetcher(config.max_image_fetch_size, config.image_fetch_hosts)
    return ImageReader(placeholder, ids[0], worker_pool(), fetcher)


def _open_trace(path: Path, info: ServerInfo, options: SchedulerOptions, held: AsyncExitStack) -> StepTrace:
    described = {"model_id": info.model_id, "engine": asdict(info.engine), "scheduler": asdict(options)}
    try:
        trace = StepTrace(path, described | {"settings": dict(info.settings), "version": info.version})
    except OSError as error:
        raise ArgumentError(f"cannot write `step_trace` {path}: {error.strerror}") from None
    held.callback(trace.close)
    return trace


async def _start_rendering(source: TemplateSource, config: RouterConfig, held: AsyncExitStack) -> RenderingPool:
    max_waiting = config.max_concurrent_requests + EXTRA_WAITING
    pool = RenderingPool(source, config.validation_workers, max_waiting, 4 * config.payload_limit)
    held.push_async_callback(pool.close)
    await pool.start()
    return pool
