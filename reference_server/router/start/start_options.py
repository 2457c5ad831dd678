"""The options of the router's parts, from its settings and from the limits and facts of the shard."""

import logging

from reference_server.adapter_source import parse_adapters
from reference_server.configuration.config import RouterConfig
from reference_server.errors import ArgumentError
from reference_server.messages import ModelInfo
from reference_server.router.api_key import read_keys
from reference_server.router.app import TransportOptions
from reference_server.router.scheduling.scheduler_options import SchedulerOptions, WireVersion
from reference_server.router.validation.token_limits import (
    ConfiguredLimits,
    TokenLimits,
    block_size_of,
)

logger = logging.getLogger(__name__)

ACCELERATOR_TIMEOUT_S = 120.0
CPU_TIMEOUT_S = 600.0


def configured_limits(config: RouterConfig) -> ConfiguredLimits:
    assert config.max_batch_prefill_tokens is not None, "the command has a default"
    return ConfiguredLimits(
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        max_input_tokens=config.max_input_tokens,
        max_total_tokens=config.max_total_tokens,
        max_batch_total_tokens=config.max_batch_total_tokens,
        max_batch_size=config.max_batch_size,
    )


def log_limits(config: RouterConfig, limits: TokenLimits) -> None:
    for warning in limits.warnings:
        logger.warning("%s", warning)
    logger.info("Setting max batch total tokens to %d", limits.max_batch_total_tokens)
    for name in ("max_input_tokens", "max_total_tokens"):
        if getattr(config, name) is None:
            logger.info("Maximum %s defaulted to %d", name.split("_")[1], getattr(limits, name))


def log_batching(config: RouterConfig, options: SchedulerOptions) -> None:
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
        block_size=block_size_of(config, info),
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


def transport_options(config: RouterConfig) -> TransportOptions:
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
