"""From a configuration to a serving router, and back (http-api.md section 7.9)."""

import asyncio
import gc
import json
import logging
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from reference_server.config import RouterConfig
from reference_server.config_fields import Secret
from reference_server.config_support import refuse_unsupported
from reference_server.errors import ArgumentError, ServerError
from reference_server.messages import ModelInfo, WarmupReply
from reference_server.router.app import RouterApp, TransportOptions, create_app
from reference_server.router.batching import Batcher
from reference_server.router.chat import RenderingPool, TemplateSource
from reference_server.router.exchange import Route
from reference_server.router.facts import EngineFacts, Platforms, ServerFacts
from reference_server.router.grammar import make_compiler
from reference_server.router.infer import Infer, Permits
from reference_server.router.metrics import Metrics
from reference_server.router.model_files import ModelFiles, find_model_files
from reference_server.router.routes.ops import OpsRoutes
from reference_server.router.scheduler import Scheduler, SchedulerOptions, Schema
from reference_server.router.server import HttpServer, bind
from reference_server.router.services import Services
from reference_server.router.trace import StepTrace
from reference_server.router.tracing import Tracing
from reference_server.router.validation import RequestLimits, Validator
from reference_server.router.warmup import V2_BLOCK_SIZES, AskedLimits, Limits, resolve_limits, warmup_request
from reference_server.router.watchdog import TimedShard, step_timeout_s
from reference_server.settings import Loaded
from reference_server.tokenizer import SlowTokenizer
from reference_server.transport.address import tcp_url
from reference_server.transport.client import connect
from reference_server.transport.shard import Shard

logger = logging.getLogger(__name__)

#: Jobs of the tokenize and template routes that may wait beside those of the requests with a permit.
EXTRA_WAITING = 64


async def serve(loaded: Loaded[RouterConfig]) -> None:
    """Serve until a signal. Raises `ServerError` when it cannot start, or when its batching loop breaks."""
    stop = _Stop()
    starting = asyncio.ensure_future(_serve(loaded, stop))
    stop.starting = starting
    try:
        await starting
    except asyncio.CancelledError:
        if not stop.is_asked:
            raise


class _Stop:
    """What a signal does: it cancels the start, or asks the servers to end; a second one insists."""

    def __init__(self) -> None:
        self.is_asked = False
        self.starting: asyncio.Future[None] | None = None
        self.servers: list[HttpServer] = []
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        logger.info("signal received, starting graceful shutdown")
        for server in self.servers:
            server.force_exit = self.is_asked
            server.should_exit = True
        if not self.servers and self.starting is not None:
            self.starting.cancel()
        self.is_asked = True


async def _serve(loaded: Loaded[RouterConfig], stop: _Stop) -> None:
    config = loaded.config
    refuse_unsupported(config)
    transport = _transport_options(config)
    _warn_of_open_routes(config)
    async with AsyncExitStack() as held:
        if config.otlp_endpoint is not None:
            transport = replace(transport, tracing=_start_tracing(config, config.otlp_endpoint, held))
        port = config.aip_http_port if config.vertex and config.aip_http_port is not None else config.port
        listener = held.enter_context(bind(config.hostname, port))
        shard = await _connect(config, held)
        await shard.clear_cache()
        info = await shard.info()
        asked = _asked_limits(config)
        logger.info("Warming up model")
        reply = await shard.warmup(warmup_request(asked))
        limits = resolve_limits(asked, reply, info)
        _log_limits(config, limits)
        options = _scheduler_options(config, limits, info)
        _log_batching(config, options)
        timed = TimedShard(shard, step_timeout_s(config.step_timeout, info.device_type))
        files = await asyncio.to_thread(
            find_model_files, config.tokenizer_name or "", config.revision, config.huggingface_hub_cache
        )
        facts = _facts(loaded, files, limits, info, reply)
        services = await _services(config, files, facts, timed, options, held)
        servers = [HttpServer(create_app(services, transport), listener)]
        if config.prometheus_port is not None:
            extra = held.enter_context(bind(config.hostname, config.prometheus_port))
            servers.append(HttpServer(_metrics_app(services), extra))
        stop.servers = servers
        # A full collection over what was imported takes 66 ms, in which no stream moves: leave it out from now on.
        gc.collect()
        gc.freeze()
        logger.info("Connected")
        await _run(services.infer.batcher, servers)


def _warn_of_open_routes(config: RouterConfig) -> None:
    """What does work for anybody although a key is set, and a listener for everybody without one."""
    if config.api_key is not None and not config.auth_all_routes:
        routes = ["/chat_tokenize"]
        if config.vertex and config.aip_predict_route:
            routes.append(config.aip_predict_route)
        if config.kserve:
            routes.append("/v2")
        logger.warning("these routes do work without the API key: %s; --auth-all-routes closes them", ", ".join(routes))


def _start_tracing(config: RouterConfig, endpoint: str, held: AsyncExitStack) -> Tracing:
    assert config.otlp_service_name is not None, "the command has a default"
    tracing = Tracing.to(endpoint, config.otlp_service_name)
    held.push_async_callback(asyncio.to_thread, tracing.close)
    return tracing


async def _connect(config: RouterConfig, held: AsyncExitStack) -> Shard:
    if config.shard_addr:
        logger.warning("the wire to %s is not authenticated", ", ".join(config.shard_addr))
    try:
        addresses = [tcp_url(address) for address in config.shard_addr] or [config.master_shard_uds_path]
    except ValueError as error:
        raise ArgumentError(f"`shard_addr`: {error}") from None
    group = await connect(addresses, config.grpc_schema)
    held.push_async_callback(group.close)
    return group


async def _run(batcher: Batcher, servers: list[HttpServer]) -> None:
    """Serve until the servers have been stopped, or the loop has broken, which ends the process."""
    loop = asyncio.ensure_future(batcher.run())
    serving = [asyncio.ensure_future(server.run_to_end()) for server in servers]
    try:
        await asyncio.wait([loop, *serving], return_when=asyncio.FIRST_COMPLETED)
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
    finally:
        loop.cancel()
        outcome = (await asyncio.gather(loop, return_exceptions=True))[0]
    if isinstance(outcome, Exception):
        raise ServerError(f"the batching loop has failed: {outcome}") from outcome


async def _services(
    config: RouterConfig,
    files: ModelFiles,
    facts: ServerFacts,
    shard: Shard,
    options: SchedulerOptions,
    held: AsyncExitStack,
) -> Services:
    tokenizer = await asyncio.to_thread(files.load_tokenizer, config.trust_remote_code)
    source = await asyncio.to_thread(files.load_template, config.tokenizer_config_path)
    rendering = None if source is None else await _start_rendering(source, config, held)
    workers = 1 if isinstance(tokenizer, SlowTokenizer) else config.validation_workers
    executor = held.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="validation"))
    metrics = Metrics(facts.limits.max_input_tokens, facts.limits.max_total_tokens)
    metrics.batch_max_total_tokens.set(options.max_batch_total_tokens)
    trace = None if config.step_trace is None else _open_trace(config.step_trace, facts, options, held)
    batcher = Batcher(shard, Scheduler(options), observer=metrics, trace=trace)
    model_type = files.read_json("config.json").get("model_type")
    grammars = make_compiler(config.disable_grammar_support, tokenizer)
    if grammars is not None:
        held.push_async_callback(grammars.close)
        grammars.start()
    compile_grammar = None if grammars is None else grammars.regex_of
    validator = Validator(tokenizer, facts.limits, executor, model_type=model_type, compile_grammar=compile_grammar)
    # A tokenizer's first call sets up its tables; no client should wait for that.
    await validator.encode("warm-up", add_special_tokens=True)
    permits = Permits(config.max_concurrent_requests, config.max_requests_per_client)
    infer = Infer(batcher, validator, permits, metrics)
    return Services(infer, metrics, facts, None if rendering is None else rendering.render)


def _open_trace(path: Path, facts: ServerFacts, options: SchedulerOptions, held: AsyncExitStack) -> StepTrace:
    described = {"model_id": facts.model_id, "engine": asdict(facts.engine), "scheduler": asdict(options)}
    try:
        trace = StepTrace(path, described | {"settings": dict(facts.settings), "version": facts.version})
    except OSError as error:
        raise ArgumentError(f"`step_trace` {path} cannot be written: {error.strerror}") from None
    held.callback(trace.close)
    return trace


async def _start_rendering(source: TemplateSource, config: RouterConfig, held: AsyncExitStack) -> RenderingPool:
    max_waiting = config.max_concurrent_requests + EXTRA_WAITING
    pool = RenderingPool(source, config.validation_workers, max_waiting, 4 * config.payload_limit)
    held.push_async_callback(pool.close)
    await pool.start()
    return pool


def _metrics_app(services: Services) -> RouterApp:
    """What `--prometheus-port` serves."""
    return RouterApp([Route("GET", "/metrics", OpsRoutes(services).metrics)], TransportOptions())


def _asked_limits(config: RouterConfig) -> AskedLimits:
    assert config.max_batch_prefill_tokens is not None, "the command has a default"
    return AskedLimits(
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        max_input_tokens=config.max_input_tokens,
        max_total_tokens=config.max_total_tokens,
        max_batch_total_tokens=config.max_batch_total_tokens,
        max_batch_size=config.max_batch_size,
    )


def _log_limits(config: RouterConfig, limits: Limits) -> None:
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


def _scheduler_options(config: RouterConfig, limits: Limits, info: ModelInfo) -> SchedulerOptions:
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
        schema=Schema(config.grpc_schema),
    )


def _transport_options(config: RouterConfig) -> TransportOptions:
    if "*" in config.cors_allow_origin:
        raise ArgumentError("`cors_allow_origin` cannot hold *; leave it out to allow any origin")
    return TransportOptions(
        payload_limit=config.payload_limit,
        api_key=None if config.api_key is None else config.api_key.get_secret_value(),
        cors_allow_origin=config.cors_allow_origin,
        plain_text_decode_errors=config.plain_text_decode_errors,
        auth_all_routes=config.auth_all_routes,
    )


def _facts(
    loaded: Loaded[RouterConfig], files: ModelFiles, limits: Limits, info: ModelInfo, reply: WarmupReply
) -> ServerFacts:
    config, backends = loaded.config, reply.backends
    kernels = backends.get("kernels")
    return ServerFacts(
        model_id=files.model_id,
        limits=RequestLimits(
            max_input_tokens=limits.max_input_tokens,
            max_total_tokens=limits.max_total_tokens,
            max_best_of=config.max_best_of,
            max_stop_sequences=config.max_stop_sequences,
            max_top_n_tokens=config.max_top_n_tokens,
            may_continue=not files.read_json("config.json").get("is_encoder_decoder", False),
        ),
        version=metadata.version("tgi-bench"),
        max_concurrent_requests=config.max_concurrent_requests,
        validation_workers=config.validation_workers,
        max_client_batch_size=config.max_client_batch_size,
        model_sha=files.sha,
        model_pipeline_tag=files.pipeline_tag,
        docker_label=config.docker_label,
        compute_type=config.compute_type or "gpu+optimized",
        platforms=Platforms(config.vertex, config.kserve, config.aip_predict_route, config.aip_health_route),
        engine=EngineFacts(
            backend=info.device_type or None,
            prefill_attention=backends.get("prefill"),
            decode_attention=backends.get("decode"),
            kernels=None if kernels is None else tuple(filter(None, kernels.split(","))),
            dtype=info.dtype.removeprefix("torch.") or None,
            quantize=None if backends.get("quantize") in ("none", "") else backends.get("quantize"),
            tuned=tuned_from(config.tuned_by),
            memory={
                name: value
                for name in ("weight_bytes", "prefill_peak_bytes", "graph_bytes")
                if (value := getattr(reply, name)) is not None
            },
        ),
        settings=described_settings(loaded, limits, backends),
    )


def tuned_from(text: str | None) -> Mapping[str, Any] | None:
    """`engine.tuned` of STUDY/TRIAL or STUDY/TRIAL/confirmed; what was gained, and under which load, follows a `?`.

    >>> tuned_from("night/12/confirmed?gain=1.1,1.05,1.15&metric=requests_per_s&load=closed")
    ... # doctest: +NORMALIZE_WHITESPACE
    {'study': 'night', 'trial': 12, 'confirmed': True,
     'gain': {'metric': 'requests_per_s', 'ratio': 1.1, 'lo': 1.05, 'hi': 1.15}, 'load': 'closed'}
    """
    if text is None:
        return None
    origin, _, facts = text.partition("?")
    study, _, trial = origin.removesuffix("/confirmed").rpartition("/")
    if not study or not trial.isdecimal():
        raise ArgumentError(f"`tuned_by` is {text!r}, not STUDY/TRIAL or STUDY/TRIAL/confirmed")
    told = {name: values[-1] for name, values in parse_qs(facts).items()}
    known = {"study": study, "trial": int(trial), "confirmed": origin.endswith("/confirmed")}
    return known | ({"gain": _gain_from(told), "load": told.get("load")} if told else {})


def _gain_from(told: Mapping[str, str]) -> Mapping[str, Any] | None:
    if "gain" not in told:
        return None
    try:
        ratio, lo, hi = map(float, told["gain"].split(","))
    except ValueError as error:
        raise ArgumentError(f"the gain in `tuned_by` is {told['gain']!r}, not RATIO,LO,HI") from error
    return {"metric": told.get("metric"), "ratio": ratio, "lo": lo, "hi": hi}


def described_settings(
    loaded: Loaded[RouterConfig], limits: Limits, backends: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Body of `/config`: value, source and reason of each setting; the launcher's where there is one."""
    config = loaded.config
    if config.launch_settings is not None:
        described: dict[str, dict[str, Any]] = json.loads(config.launch_settings)
    else:
        described = {
            name: {"value": _plain(getattr(config, name)), "source": loaded.sources[name]}
            for name in type(config).model_fields
            if name != "launch_settings"
        }
    for name in ("max_input_tokens", "max_total_tokens", "max_batch_total_tokens"):
        if getattr(config, name) != getattr(limits, name):
            reason = "what the model server's warm-up found to fit"
            described[name] = {"value": getattr(limits, name), "source": "derived", "reason": reason}
    if "reason" in backends and described.get("attention", {}).get("value") in (None, "auto"):
        chosen = f"{backends.get('prefill')} for prefill, {backends.get('decode')} for decode"
        described["attention"] = {"value": chosen, "source": "derived", "reason": backends["reason"]}
    return described


def _plain(value: object) -> Any:
    """A setting as JSON; secrets stay secret."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Secret():
            return "***"
        case tuple():
            return [_plain(item) for item in value]
        case _:
            return str(value)
