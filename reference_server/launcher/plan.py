"""The plan of a launch: `LaunchPlan.resolve` fills every default, with a reason for each. Pure.

Most rules are the public launcher's (launcher/src/main.rs and gpu.rs).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pydantic

from reference_server.configuration.config import ServerConfig
from reference_server.configuration.model_config import BITSANDBYTES
from reference_server.errors import ArgumentError, StartupError
from reference_server.images.placeholder import PLACEHOLDERS, WHOLE_PROMPTS
from reference_server.launcher.devices import Devices, multiply_single
from reference_server.launcher.model_facts import ModelFacts
from reference_server.presets.catalog import find

KNOWN_HEAD_DIMS = (64, 128, 256)
# Families for which TGI does not use FlashInfer.
NOT_FLASHINFER = ("falcon", "deepseek_v2")
GIB = 2**30
PLANNED_WIGGLE_ROOM = 0.95
LEAST_OPTIMAL_TOKENS = 100
DEFAULT_PREFILL_TOKENS = 4096
PREFILL_TOKENS_BY_MODEL = {"qwen2_vl": 10_000, "qwen2_5_vl": 10_000, "gemma3": 8_000}


class NotEnoughDevicesError(StartupError):
    """More shards than devices."""


@dataclass(frozen=True, slots=True)
class ResolvedSetting:
    """A default that was filled in, with the reason for its value."""

    field: str
    value: object
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch with all defaults resolved.

    `config` holds the values that the child processes get. `requested_attention` is the name that TGI's launcher would
    set; it is logged and decides prefix caching, but is exported only if the user set it.
    """

    config: ServerConfig
    num_shards: int
    requested_attention: str
    compute_type: str | None
    resolved: tuple[ResolvedSetting, ...]
    warnings: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Shards of all nodes together."""
        return self.num_shards * self.config.num_nodes

    @property
    def ranks(self) -> range:
        """The shards that this node starts."""
        first = self.config.node_rank * self.num_shards
        return range(first, first + self.num_shards)

    @property
    def has_router(self) -> bool:
        """Whether this node starts the router, as the first one does."""
        return self.config.node_rank == 0

    @classmethod
    def resolve(cls, config: ServerConfig, facts: ModelFacts | None, devices: Devices) -> "LaunchPlan":
        """Fill the defaults of `config` for a model and a machine; `facts` None means an unknown model.

        Raises `ArgumentError` for settings that cannot work together, `NotEnoughDevicesError`.
        """
        num_shards, shard_reason = count_shards(config, devices)
        _check_addresses(config, num_shards)
        method = config.quantize or (facts.quantize if facts else None)
        attention, prefix_caching, attention_reason = choose_attention(config, facts, devices)
        compute_type = _compute_type(config, devices, num_shards)
        prefill, prefill_reason, prefill_warnings = prefill_tokens(config, facts, devices, num_shards, method)
        defaults = [
            ResolvedSetting("num_shard", num_shards, shard_reason),
            ResolvedSetting("prefix_caching", prefix_caching, attention_reason),
            ResolvedSetting("max_batch_prefill_tokens", prefill, prefill_reason),
            ResolvedSetting("quantize", method, "the checkpoint's quantization_config"),
            ResolvedSetting("run_ahead", config.run_ahead is not False, "it does not change outputs"),
            ResolvedSetting("max_input_tokens", config.max_input_tokens or config.max_input_length, "max_input_length"),
            ResolvedSetting("tokenizer_name", config.tokenizer_name or config.model_id, "the model's own tokenizer"),
            ResolvedSetting("compute_type", compute_type, "number of shards and GPU name"),
            *_load_defaults(config),
            *_rope_defaults(config),
            *_machine_defaults(config, devices, num_shards),
        ]
        resolved = tuple(each for each in defaults if each.value != getattr(config, each.field))
        return cls(
            config=_with(config, resolved),
            num_shards=num_shards,
            requested_attention=attention,
            compute_type=compute_type,
            resolved=resolved,
            warnings=tuple(_warnings(config, method, devices, compute_type)) + prefill_warnings,
        )


def count_shards(config: ServerConfig, devices: Devices) -> tuple[int, str]:
    """The number of shards by `--sharded`, `--num-shard` and the visible devices, and the reason."""
    requested, visible = config.num_shard, devices.visible
    if config.sharded:
        number, reason = (requested, "--num-shard") if requested is not None else (visible, "visible devices")
        if number is None:
            raise NotEnoughDevicesError("`sharded` is true, but no variable lists the devices")
        if number <= 1:
            raise NotEnoughDevicesError(f"`sharded` is true, but there is {number} device")
    elif requested is not None:
        number, reason = requested, "--num-shard"
    elif config.sharded is False or visible is None:
        number, reason = 1, "the default"
    else:
        number, reason = visible, "visible devices"
    if number == 0:
        raise ArgumentError("`num_shard` is 0, but must be at least 1")
    return number, reason


def _check_addresses(config: ServerConfig, num_shards: int) -> None:
    """With several nodes, `shard_addr` has the address of every shard."""
    world_size = num_shards * config.num_nodes
    if config.num_nodes > 1 and len(config.shard_addr) != world_size:
        raise ArgumentError(
            f"`shard_addr` names {len(config.shard_addr)} shards but {config.num_nodes} nodes of {num_shards} have "
            f"{world_size}"
        )


def choose_attention(config: ServerConfig, facts: ModelFacts | None, devices: Devices) -> tuple[str, bool, str]:
    """The attention that TGI would request, whether prefixes are cached, and the reason. The user's settings win."""
    attention = _attention(config, facts, devices)
    return attention, *_prefix_caching(config, facts, devices, attention)


def _attention(config: ServerConfig, facts: ModelFacts | None, devices: Devices) -> str:
    if config.attention != "auto":
        return config.attention
    if facts is None or (facts.head_dim in KNOWN_HEAD_DIMS and facts.model_type not in NOT_FLASHINFER):
        return "flashinfer"
    capability = devices.gpus[0].capability if devices.gpus else None
    return "flashdecoding" if capability is not None and capability >= 8 else "paged"


def _prefix_caching(
    config: ServerConfig, facts: ModelFacts | None, devices: Devices, attention: str
) -> tuple[bool, str]:
    """Whether prefixes are cached, and the first reason that decides it."""
    if config.prefix_caching is not None:
        return config.prefix_caching, "requested"
    rope_type = config.rope_scaling or (None if facts is None else facts.rope_type)
    if rope_type == "dynamic":
        return False, "dynamic rope scaling"
    if rope_type in ("longrope", "su") and _may_exceed_original_maximum(config, facts):
        return False, "long rope: the keys depend on whether the request is longer than the original maximum"
    if facts is not None:
        if (reason := _why_prefixes_differ(facts)) is not None:
            return False, reason
        if facts.head_dim not in KNOWN_HEAD_DIMS and devices.gpus:
            return False, f"head size {facts.head_dim}"
        # Unlike TGI's, the CPU kernel here reads cached blocks of any head size.
        if facts.head_dim not in KNOWN_HEAD_DIMS and config.attention != "paged":
            return True, "the CPU's attention reads earlier blocks of any head size"
    return (False, "paged attention") if attention == "paged" else (True, "default")


def _why_prefixes_differ(facts: ModelFacts) -> str | None:
    """Why equal first tokens of two prompts can have different keys and values; None if they cannot."""
    if facts.has_vision and facts.model_type not in PLACEHOLDERS:
        return "vision model"
    if facts.model_type in WHOLE_PROMPTS:
        return "all tokens of a prompt attend to each other"
    return "encoder-decoder model" if facts.is_encoder_decoder else None


def _may_exceed_original_maximum(config: ServerConfig, facts: ModelFacts | None) -> bool:
    original = None if facts is None else facts.rope_original_max
    return original is None or config.max_total_tokens is None or config.max_total_tokens > original


def prefill_tokens(
    config: ServerConfig, facts: ModelFacts | None, devices: Devices, num_shards: int, method: str | None
) -> tuple[int, str, tuple[str, ...]]:
    """`max_batch_prefill_tokens`, the reason, and warnings."""
    if config.max_batch_prefill_tokens is not None:
        return config.max_batch_prefill_tokens, "requested", ()
    tokens, reason = _base_prefill_tokens(facts, devices, num_shards)
    if facts is not None and facts.max_position_embeddings is not None and facts.max_position_embeddings < tokens:
        tokens, reason = facts.max_position_embeddings, "the model's positions"
    warnings: tuple[str, ...] = ()
    fit = _tokens_in_memory(config, facts, devices, num_shards) if method is None else None
    if fit is not None and fit < tokens:
        tokens, reason = max(1, fit), "tokens that fit in device memory"
        warnings = (f"Device memory limits `max_batch_prefill_tokens` to {tokens}",)
    limit = config.max_batch_total_tokens
    if limit is not None and limit < tokens:
        tokens, reason = limit, "`max_batch_total_tokens`"
    prompt = config.max_input_tokens or config.max_input_length
    if not config.prefill_chunking and prompt is not None and prompt > tokens:
        tokens, reason = prompt, "the longest prompt, which is prefilled whole"
    return tokens, reason, warnings


def _base_prefill_tokens(facts: ModelFacts | None, devices: Devices, num_shards: int) -> tuple[int, str]:
    teraflops = devices.gpus[0].teraflops if devices.gpus else None
    flop = facts.flop_per_token if facts else None
    if teraflops is not None and flop:
        optimal = teraflops * 10**12 * num_shards // flop
        if optimal > LEAST_OPTIMAL_TOKENS:
            return optimal, f"tokens that {num_shards} x {devices.gpus[0].compute_name} compute in a second"
    model_type = facts.model_type if facts else None
    return PREFILL_TOKENS_BY_MODEL.get(model_type or "", DEFAULT_PREFILL_TOKENS), "default of the model type"


def _tokens_in_memory(config: ServerConfig, facts: ModelFacts | None, devices: Devices, num_shards: int) -> int | None:
    if facts is None or not devices.gpus:
        return None
    total = devices.gpus[0].memory_mib * 2**20
    room = config.wiggle_room or PLANNED_WIGGLE_ROOM
    return facts.tokens_that_fit(multiply_single(total, num_shards, config.cuda_memory_fraction, room))


def _compute_type(config: ServerConfig, devices: Devices, num_shards: int) -> str | None:
    if config.compute_type is not None or not devices.gpus:
        return config.compute_type
    return f"{num_shards}-{devices.gpus[0].compute_name}"


def _load_defaults(config: ServerConfig) -> Iterator[ResolvedSetting]:
    preset = find(config.model_id) if config.model_id else None
    if preset is not None and not preset.has_weights and config.load_format == "auto":
        yield ResolvedSetting("load_format", "dummy", f"{preset.model_id} has no weights: seeded random weights")


def _rope_defaults(config: ServerConfig) -> Iterator[ResolvedSetting]:
    if config.rope_factor is not None and config.rope_scaling is None:
        yield ResolvedSetting("rope_scaling", "linear", "--rope-factor alone is linear scaling")
    if config.rope_scaling is not None and config.rope_factor is None:
        yield ResolvedSetting("rope_factor", 1.0, "--rope-scaling alone has factor 1")


def _machine_defaults(config: ServerConfig, devices: Devices, num_shards: int) -> Iterator[ResolvedSetting]:
    """Defaults that differ between an accelerator and a CPU."""
    if config.step_timeout is None:
        yield ResolvedSetting("step_timeout", *((120.0, "on an accelerator") if devices.gpus else (600.0, "on a CPU")))
    if devices.gpus:
        return
    if config.cpu_memory_gib is None and devices.available_memory_bytes:
        half = devices.available_memory_bytes / 2 / GIB
        yield ResolvedSetting(
            "cpu_memory_gib", round(min(4.0, half), 3), "the smaller of 4 and half of the free memory"
        )
    if config.compute_threads is None:
        threads = max(1, (devices.num_cores - 1) // num_shards)
        shared = f", divided by {num_shards} shards" if num_shards > 1 else ""
        yield ResolvedSetting("compute_threads", threads, f"{devices.num_cores} cores but one{shared}")


def _warnings(config: ServerConfig, method: str | None, devices: Devices, compute_type: str | None) -> Iterator[str]:
    if config.trust_remote_code:
        yield "`trust_remote_code` is on: code from the model's repository runs"
    if method == "bitsandbytes":
        yield "bitsandbytes is deprecated, use eetq"
    if method in (BITSANDBYTES[0], "exl2") and config.cuda_graphs is None:
        yield f"CUDA graphs are not captured with {method}"
    if config.lora_adapters and config.cuda_graphs is None:
        yield "CUDA graphs are not captured with adapters"
    if devices.gpus and devices.gpus[0].teraflops is None:
        yield f"Unknown compute of {compute_type}: `max_batch_prefill_tokens` is not derived from it"
    if config.master_addr is not None:
        yield f"The rendezvous at {config.master_addr}:{config.master_port} listens without authentication"
    if config.shard_addr:
        yield "The wire to --shard-addr has neither authentication nor encryption"


def _with(config: ServerConfig, resolved: Iterable[ResolvedSetting]) -> ServerConfig:
    changes: dict[str, object] = {each.field: each.value for each in resolved}
    if config.max_input_length is not None:
        changes["max_input_length"] = None
    try:
        return ServerConfig.model_validate(dict(config) | changes)
    except pydantic.ValidationError as error:
        raise ArgumentError(
            "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors())
        ) from None
