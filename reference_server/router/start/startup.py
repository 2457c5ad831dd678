"""Starts the router: connect to the shards, warm up, load the tokenizer, serve until a signal."""

import asyncio
import gc
import logging
from contextlib import AsyncExitStack
from dataclasses import replace

from reference_server.configuration.config import RouterConfig
from reference_server.configuration.config_support import refuse_unsupported
from reference_server.configuration.settings import Loaded
from reference_server.errors import ArgumentError, ShardError
from reference_server.listening import is_loopback, listening_address
from reference_server.router.app import RouterApp, TransportOptions, create_app
from reference_server.router.connection import ConnectionLimits
from reference_server.router.http_call import Route
from reference_server.router.routes.ops import OpsRoutes
from reference_server.router.server import HttpServer, bind
from reference_server.router.server_info import server_info
from reference_server.router.services import Services
from reference_server.router.start.graceful_stop import GracefulStop, run_until_stopped
from reference_server.router.start.make_services import make_services
from reference_server.router.start.start_options import (
    configured_limits,
    log_batching,
    log_limits,
    scheduler_options,
    step_timeout_s,
    transport_options,
)
from reference_server.router.telemetry.tracing import Tracing
from reference_server.router.timed_shard import TimedShard
from reference_server.router.tokenizer_files import find_tokenizer_files
from reference_server.router.validation.token_limits import (
    resolve_limits,
    warmup_request,
)
from reference_server.transport.address import tcp_url
from reference_server.transport.client import connect
from reference_server.transport.shard import ShardGroup

logger = logging.getLogger(__name__)


async def serve(loaded: Loaded[RouterConfig]) -> None:
    """Serve until a signal. Raises `ServerError` if the router cannot start or its batching loop fails."""
    stop = GracefulStop()
    starting = asyncio.ensure_future(_serve(loaded, stop))
    stop.starting = starting
    try:
        await starting
    except asyncio.CancelledError:
        if not stop.is_requested:
            raise


async def _serve(loaded: Loaded[RouterConfig], stop: GracefulStop) -> None:
    config = loaded.config
    refuse_unsupported(config)
    transport = transport_options(config)
    warn_of_open_routes(config)
    async with AsyncExitStack() as held:
        if config.otlp_endpoint is not None:
            transport = replace(transport, tracing=_start_tracing(config, config.otlp_endpoint, held))
        port = config.aip_http_port if config.vertex and config.aip_http_port is not None else config.port
        listener = held.enter_context(bind(config.hostname, port))
        shard = await _connect(config, held)
        await shard.clear_cache()
        info = await shard.info()
        configured = configured_limits(config)
        logger.info("Warming up model")
        reply = await shard.warmup(warmup_request(configured))
        limits = resolve_limits(configured, reply, info)
        log_limits(config, limits)
        options = scheduler_options(config, limits, info)
        log_batching(config, options)
        timed = TimedShard(shard, step_timeout_s(config.step_timeout, info.device_type), shard.turns_to_send)
        files = await asyncio.to_thread(
            find_tokenizer_files, config.tokenizer_name or "", config.revision, config.huggingface_hub_cache
        )
        info_page = server_info(loaded, files, limits, info, reply)

        async def warm_up() -> None:
            again = resolve_limits(configured, await shard.warmup(warmup_request(configured)), await shard.info())
            if again.max_batch_total_tokens < limits.max_batch_total_tokens:
                raise ShardError(
                    f"the model server restarted with memory for {again.max_batch_total_tokens} tokens, not "
                    f"{limits.max_batch_total_tokens}: restart the router"
                )
            await services.adapters.restore(shard)

        services = await make_services(config, files, info_page, timed, options, info.accepts_schemas, warm_up, held)
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


def _metrics_app(services: Services) -> RouterApp:
    """The application on `--prometheus-port`."""
    return RouterApp([Route("GET", "/metrics", OpsRoutes(services).metrics)], TransportOptions())
