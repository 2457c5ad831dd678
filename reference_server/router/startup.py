"""Starts and stops the router: connect to the shards, warm up, load the tokenizer, serve until a signal."""

import asyncio
import gc
import logging
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from reference_server.adapter_source import parse_adapters
from reference_server.configuration.config import RouterConfig
from reference_server.configuration.config_support import refuse_unsupported
from reference_server.configuration.settings import Loaded
from reference_server.errors import ArgumentError, ServerError, ShardError
from reference_server.images.fetch import ImageFetcher
from reference_server.images.placeholder import VisionConfig, placeholder_of
from reference_server.images.reader import ImageReader, worker_pool
from reference_server.listening import is_loopback, listening_address
from reference_server.messages import ModelInfo
from reference_server.router.api_key import read_keys
from reference_server.router.app import RouterApp, TransportOptions, create_app
from reference_server.router.batching import Batcher
from reference_server.router.chat.prompts import TemplateSource
from reference_server.router.chat.rendering_pool import RenderingPool
from reference_server.router.connection import ConnectionLimits
from reference_server.router.grammar_compiler import make_compiler
from reference_server.router.http_call import Route
from reference_server.router.infer import Infer, Permits
from reference_server.router.routes.ops import OpsRoutes
from reference_server.router.scheduling.scheduler import Scheduler, SchedulerOptions, WireVersion
from reference_server.router.served_adapters import AdapterRules, Adapters
from reference_server.router.server import HttpServer, bind
from reference_server.router.server_info import ServerInfo, server_info
from reference_server.router.services import Drain, Services
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.telemetry.step_trace import StepTrace
from reference_server.router.telemetry.tracing import Tracing
from reference_server.router.timed_shard import TimedShard
from reference_server.router.tokenizer_files import TokenizerFiles, find_tokenizer_files
from reference_server.router.validation.token_limits import (
    V2_BLOCK_SIZES,
    ConfiguredLimits,
    TokenLimits,
    resolve_limits,
    warmup_request,
)
from reference_server.router.validation.validator import Validator
from reference_server.tokenizer import SlowTokenizer, Tokenizer
from reference_server.transport.address import tcp_url
from reference_server.transport.client import connect
from reference_server.transport.shard import ShardGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

ACCELERATOR_TIMEOUT_S = 120.0
CPU_TIMEOUT_S = 600.0
#: Time that open connections have to end after the batching loop has failed.
FAILURE_GRACE_S = 2.0
#: Template jobs that may wait beyond those of requests with a permit.
EXTRA_WAITING = 64


async def serve(loaded: Loaded[RouterConfig]) -> None:
    """Serve until a signal. Raises `ServerError` if the router cannot start or its batching loop fails."""
    stop = _Stop()
    starting = asyncio.ensure_future(_serve(loaded, stop))
    stop.starting = starting
    try:
        await starting
    except asyncio.CancelledError:
        if not stop.is_requested:
            raise


class _Stop:
    """On a signal, cancels the start or stops the servers gracefully; a second signal stops them at once.

    `delay_s`: the time in which the servers still accept requests, while `drain` has begun.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.starting: asyncio.Future[None] | None = None
        self.servers: list[HttpServer] = []
        self.drain = Drain()
        self.delay_s = 0.0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        logger.info("signal received, starting graceful shutdown")
        self.drain.has_begun = True
        if not self.servers and self.starting is not None:
            self.starting.cancel()
        if self.is_requested or not self.delay_s:
            self._stop_servers(is_forced=self.is_requested)
        else:
            asyncio.get_running_loop().call_later(self.delay_s, self._stop_servers)
        self.is_requested = True

    def _stop_servers(self, *, is_forced: bool = False) -> None:
        for server in self.servers:
            server.force_exit = server.force_exit or is_forced
            server.should_exit = True


async def _serve(loaded: Loaded[RouterConfig], stop: _Stop) -> None:
    config = loaded.config
    refuse_unsupported(config)
    transport = _transport_options(config)
    warn_of_open_routes(config)
    async with AsyncExitStack() as held:
        if config.otlp_endpoint is not None:
            transport = replace(transport, tracing=_start_tracing(config, config.otlp_endpoint, held))
        port = config.aip_http_port if config.vertex and config.aip_http_port is not None else config.port
        listener = held.enter_context(bind(config.hostname, port))
        shard = await _connect(config, held)
        await shard.clear_cache()
        info = await shard.info()
        configured = _configured_limits(config)
        logger.info("Warming up model")
        reply = await shard.warmup(warmup_request(configured))
        limits = resolve_limits(configured, reply, info)
        _log_limits(config, limits)
        options = scheduler_options(config, limits, info)
        _log_batching(config, options)
        timed = TimedShard(shard, step_timeout_s(config.step_timeout, info.device_type), shard.turns_to_send)
        files = await asyncio.to_thread(
            find_tokenizer_files, config.tokenizer_name or "", config.revision, config.huggingface_hub_cache
        )
        info_page = server_info(loaded, files, limits, info, reply)

        async def warm_up() -> None:
            again = resolve_limits(configured, await shard.warmup(warmup_request(configured)), await shard.info())
            if again.max_batch_total_tokens < limits.max_batch_total_tokens:
                raise ShardError(
                    f"the model server restarted with room for {again.max_batch_total_tokens} tokens, not "
                    f"{limits.max_batch_total_tokens}: restart the router"
                )
            await services.adapters.restore(shard)

        services = await _services(config, files, info_page, timed, options, info.accepts_schemas, warm_up, held)
        services = replace(services, drain=stop.drain)
        limits_of_connections = ConnectionLimits(body_bytes=config.payload_limit)
        servers = [HttpServer(create_app(services, transport), listener, limits_of_connections)]
        if config.prometheus_port is not None:
            extra = held.enter_context(bind(config.hostname, config.prometheus_port))
            servers.append(HttpServer(_metrics_app(services), extra))
        stop.servers, stop.delay_s = servers, config.shutdown_delay
        # A full collection over all imported objects blocks every stream for 66 ms: exclude these objects from now on.
        gc.collect()
        gc.freeze()
        logger.info("Connected")
        await run_until_stopped(services.infer.batcher, servers)


def warn_of_open_routes(config: RouterConfig) -> None:
    """Warn of routes that need no API key although one is set, and of a server without a key that others can reach."""
    address = listening_address(config.hostname)
    has_key = config.api_key is not None or config.api_key_file is not None
    if not has_key and not is_loopback(address):
        logger.warning(
            "listening on %s without an API key: every client that reaches the port may use the server; "
            "set `--api-key`, or `--hostname 127.0.0.1` to serve this machine only",
            address,
        )
    if has_key and not config.auth_all_routes:
        routes = ["/chat_tokenize"]
        if config.vertex and config.aip_predict_route:
            routes.append(config.aip_predict_route)
        if config.kserve:
            routes.append("/v2")
        logger.warning("these routes need no API key: %s; --auth-all-routes protects them", ", ".join(routes))


def _start_tracing(config: RouterConfig, endpoint: str, held: AsyncExitStack) -> Tracing:
    assert config.otlp_service_name is not None, "the command has a default"
    tracing = Tracing.to(endpoint, config.otlp_service_name)
    held.push_async_callback(asyncio.to_thread, tracing.close)
    return tracing


async def _connect(config: RouterConfig, held: AsyncExitStack) -> ShardGroup:
    if config.shard_addr:
        logger.warning("the wire to %s is not authenticated", ", ".join(config.shard_addr))
    try:
        addresses = [tcp_url(address) for address in config.shard_addr] or [config.master_shard_uds_path]
    except ValueError as error:
        raise ArgumentError(f"`shard_addr`: {error}") from None
    group = await connect(addresses, config.grpc_schema, config.transport)
    held.push_async_callback(group.close)
    return group


async def run_until_stopped(batcher: Batcher, servers: list[HttpServer], grace_s: float = FAILURE_GRACE_S) -> None:
    """Serve until the servers are stopped. Raises `ServerError` if the batching loop fails first.

    After such a failure, connections that are still open after `grace_s` are closed.
    """
    loop = asyncio.ensure_future(batcher.run())
    serving = [asyncio.ensure_future(server.run_to_end()) for server in servers]
    try:
        await asyncio.wait([loop, *serving], return_when=asyncio.FIRST_COMPLETED)
        for server in servers:
            server.should_exit = True
        if loop.done():
            await asyncio.wait(serving, timeout=grace_s)
            for server in servers:
                server.force_exit = True
        await asyncio.gather(*serving)
    finally:
        loop.cancel()
        outcome = (await asyncio.gather(loop, return_exceptions=True))[0]
    if isinstance(outcome, Exception):
        raise ServerError(f"the batching loop failed: {outcome}") from outcome


async def _services(
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


def _metrics_app(services: Services) -> RouterApp:
    """The application on `--prometheus-port`."""
    return RouterApp([Route("GET", "/metrics", OpsRoutes(services).metrics)], TransportOptions())


def _configured_limits(config: RouterConfig) -> ConfiguredLimits:
    assert config.max_batch_prefill_tokens is not None, "the command has a default"
    return ConfiguredLimits(
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        max_input_tokens=config.max_input_tokens,
        max_total_tokens=config.max_total_tokens,
        max_batch_total_tokens=config.max_batch_total_tokens,
        max_batch_size=config.max_batch_size,
    )


def _log_limits(config: RouterConfig, limits: TokenLimits) -> None:
    for warning in limits.warnings:
        logger.warning("%s", warning)
    logger.info("Setting max batch total tokens to %d", limits.max_batch_total_tokens)
    for name in ("max_input_tokens", "max_total_tokens"):
        if getattr(config, name) is None:
            logger.info("Maximum %s defaulted to %d", name.split("_")[1], getattr(limits, name))


def _log_batching(config: RouterConfig, options: SchedulerOptions) -> None:
    prefix = "on" if options.use_prefix_caching else "off"
    logger.info("Using schema %s, blocks of %d tokens, prefix cache %s", options.schema, options.block_size, prefix)
    if options.chunks_prefills:
        logger.warning("prompts are prefilled in chunks: `waiting_served_ratio` and `max_waiting_tokens` are ignored")
        if config.max_batch_size is not None:
            logger.warning("prompts are prefilled in chunks: `max_batch_size` limits the first batch only")


def scheduler_options(config: RouterConfig, limits: TokenLimits, info: ModelInfo) -> SchedulerOptions:
    assert config.waiting_served_ratio is not None, "the command has a default"
    return SchedulerOptions(
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_batch_total_tokens=limits.max_batch_total_tokens,
        waiting_served_ratio=config.waiting_served_ratio,
        max_waiting_tokens=config.max_waiting_tokens,
        max_batch_size=config.max_batch_size,
        requires_padding=info.requires_padding,
        supports_chunking=info.support_chunking,
        block_size=V2_BLOCK_SIZES[config.shard_attention] if config.grpc_schema == "v2" else info.block_size,
        use_prefix_caching=info.use_prefix_caching,
        window_size=info.window_size,
        speculate=info.speculate,
        schema=WireVersion(config.grpc_schema),
        adapters=adapter_ids(config, info),
    )


def adapter_ids(config: RouterConfig, info: ModelInfo) -> tuple[str, ...]:
    """The adapters that the shard has: those of the setting, which TGI's does not report, and those that it reports."""
    named = (source.name for source in parse_adapters(config.lora_adapters))
    return tuple(dict.fromkeys([*named, *info.adapters]))


def _transport_options(config: RouterConfig) -> TransportOptions:
    if "*" in config.cors_allow_origin:
        raise ArgumentError("`cors_allow_origin` cannot hold *; leave it out to allow any origin")
    return TransportOptions(
        payload_limit=config.payload_limit,
        api_keys=_api_keys(config),
        cors_allow_origin=config.cors_allow_origin,
        plain_text_decode_errors=config.plain_text_decode_errors,
        auth_all_routes=config.auth_all_routes,
    )


def _api_keys(config: RouterConfig) -> tuple[str, ...]:
    given = () if config.api_key is None else (config.api_key.get_secret_value(),)
    return given if config.api_key_file is None else (*given, *read_keys(config.api_key_file))


def step_timeout_s(configured_s: float | None, device_type: str) -> float:
    """The time limit of one step: as configured, or the device's default."""
    if configured_s is not None:
        return configured_s
    return CPU_TIMEOUT_S if device_type == "cpu" else ACCELERATOR_TIMEOUT_S
