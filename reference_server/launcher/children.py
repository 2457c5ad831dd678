"""Command line and environment of every child process. Pure: strings in, strings out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reference_server.adapter_source import AdapterSource, parse_adapters
from reference_server.configuration.common_config import HubConfig
from reference_server.configuration.config import RouterConfig, ServerConfig, ShardConfig
from reference_server.configuration.config_fields import Secret, argv_of, environ_of, text_of, variables_of
from reference_server.configuration.ignored_variables import without_ignored
from reference_server.launcher.plan import LaunchPlan
from reference_server.model_files import config_of, is_speculator
from reference_server.model_server.weights.files import (
    SAFETENSORS,
    file_names,
    is_adapter,
    missing_shards,
    weight_names,
)
from reference_server.presets.catalog import find, find_adapter

SERVER_PROGRAM = "text-generation-server"
ROUTER_PROGRAM = "text-generation-router"

# Settings that a shard gets as flags; all others that differ from the default are passed as variables.
SHARD_FLAGS = frozenset({
    "model_id", "revision", "trust_remote_code", "json_output", "sharded", "quantize", "speculate", "dtype",
    "kv_cache_dtype", "load_format", "otlp_service_name", "max_input_tokens", "uds_path",
    "logger_level", "listen",
})  # fmt: skip
ROUTER_ALWAYS = frozenset({
    "max_client_batch_size", "max_concurrent_requests", "max_best_of", "max_stop_sequences", "max_top_n_tokens",
    "max_batch_prefill_tokens", "waiting_served_ratio", "max_waiting_tokens", "validation_workers", "hostname", "port",
    "tokenizer_name", "payload_limit", "usage_stats", "otlp_service_name",
})  # fmt: skip
# The launcher reads these and passes on the results.
_READ_BY_LAUNCHER = ("CONFIG_FILE", "LOG_LEVEL", "API_KEY", "NGROK_AUTHTOKEN", "RENDEZVOUS_FILE")
_LOGGER_LEVELS = {"trace": "TRACE", "debug": "DEBUG", "info": "INFO", "warn": "WARNING", "warning": "WARNING",
                  "error": "ERROR", "off": "CRITICAL"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Programs:
    """The first words of the command lines of the other two programs."""

    server: tuple[str, ...]
    router: tuple[str, ...]

    @classmethod
    def beside(cls, interpreter: str) -> "Programs":
        """The console scripts in the folder of `interpreter`, or else their modules."""

        def words(name: str, module: str) -> tuple[str, ...]:
            script = Path(interpreter).parent / name
            return (str(script),) if script.is_file() else (interpreter, "-m", module)

        return cls(
            server=words(SERVER_PROGRAM, "reference_server.model_server.cli"),
            router=words(ROUTER_PROGRAM, "reference_server.router.cli"),
        )


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """Command line and environment of a child process. Only `argv` may be logged: `environ` has secrets."""

    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)


def needs_download(config: ServerConfig) -> bool:
    """Whether weights must be downloaded, converted or merged before a shard can load them."""
    assert config.model_id is not None
    if config.load_format == "dummy" or find(config.model_id) is not None:
        return False
    directory = Path(config.model_id)
    names = file_names(directory)
    weights = weight_names(names, SAFETENSORS)
    # A speculator's base model may be missing.
    has_base = is_speculator(config_of(directory))
    return is_adapter(names) or has_base or not weights or bool(missing_shards(weights))


def hub_adapters(config: ServerConfig) -> tuple[AdapterSource, ...]:
    """The adapters of `--lora-adapters` that are repositories of the hub."""
    return tuple(
        source
        for source in parse_adapters(config.lora_adapters, config.model_id)
        if find_adapter(source.location) is None
        and not source.location.startswith(("/", "./", "../"))
        and not Path(source.location).is_dir()
    )


def download_command(plan: LaunchPlan, programs: Programs, environ: Mapping[str, str]) -> ChildCommand:
    """Download the model's weights; an adapter is merged into its base model."""
    config = plan.config
    assert config.model_id is not None
    flags = ["--merge-lora", *(["--trust-remote-code"] if config.trust_remote_code else [])]
    return _download(config, programs, environ, config.model_id, config.revision, flags)


def download_adapter_command(
    source: AdapterSource, plan: LaunchPlan, programs: Programs, environ: Mapping[str, str]
) -> ChildCommand:
    """Download an adapter, which stays as it is."""
    # The override has the files of the model.
    config = plan.config.model_copy(update={"weights_cache_override": None})
    return _download(config, programs, environ, source.location, source.revision, [])


def _download(
    config: ServerConfig,
    programs: Programs,
    environ: Mapping[str, str],
    model_id: str,
    revision: str | None,
    flags: Sequence[str],
) -> ChildCommand:
    argv = [*programs.server, "download-weights", model_id, "--extension", ".safetensors"]
    argv += ["--logger-level", "INFO", "--json-output", *flags, *(["--revision", revision] if revision else [])]
    added = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", **_hub_variables(config)}
    return ChildCommand(tuple(argv), _inherited(environ, ShardConfig) | added)


def shard_command(
    plan: LaunchPlan, programs: Programs, environ: Mapping[str, str], rank: int, uds_path: str, rendezvous: Path
) -> ChildCommand:
    """Serve a shard on the socket `uds_path`-`rank`, or with several nodes at its TCP address."""
    config = plan.config
    several = config.num_nodes > 1
    # The setting is per node; a shard expects the sum over all ranks.
    memory_gib = None if config.cpu_memory_gib is None else config.cpu_memory_gib * config.num_nodes
    shard = config.part(
        ShardConfig,
        config_file=None,
        shard_addr=config.shard_addr if several else (),
        listen=config.shard_addr[rank] if several else None,
        cpu_memory_gib=memory_gib,
        json_output=True,
        uds_path=uds_path,
        sharded=plan.world_size > 1,
        logger_level=logger_level(config.log_level),
    )
    by_flag = {name: value for name, value in shard if name in SHARD_FLAGS}
    argv = argv_of(ShardConfig.model_validate(by_flag), always={"uds_path", "logger_level"})
    words = (*programs.server, "serve", *argv)
    variables = {
        **_inherited(environ, ShardConfig),
        **_shard_settings(shard),
        **_process_group(config, plan.world_size, rank, rendezvous, environ),
        **{name: environ.get(name, value) for name, value in _runtime_defaults(config).items()},
    }
    return ChildCommand(words, variables)


def router_command(
    plan: LaunchPlan,
    programs: Programs,
    environ: Mapping[str, str],
    uds_path: str,
    sources: Mapping[str, str],
) -> ChildCommand:
    """Serve HTTP for the shards on `uds_path`, or for the model servers of --shard-addr."""
    config = plan.config
    router = config.part(
        RouterConfig,
        config_file=None,
        **({} if config.shard_addr else {"master_shard_uds_path": f"{uds_path}-0"}),
        compute_type=plan.compute_type,
        shard_attention=config.attention,
        launch_settings=json.dumps(launch_settings(plan, sources), separators=(",", ":")),
    )
    always = ROUTER_ALWAYS if config.shard_addr else ROUTER_ALWAYS | {"master_shard_uds_path"}
    words = (*programs.router, *argv_of(router, always=always))
    adapters = {"LORA_ADAPTERS": ",".join(config.lora_adapters)} if config.lora_adapters else {}
    # The router's workers are spawned, not forked; without this gRPC logs a line for each.
    no_forks = {"GRPC_ENABLE_FORK_SUPPORT": environ.get("GRPC_ENABLE_FORK_SUPPORT", "false")}
    return ChildCommand(words, _inherited(environ, RouterConfig) | environ_of(router) | adapters | no_forks)


def launch_settings(plan: LaunchPlan, sources: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """For /config: every setting with its source and, if it was derived, the reason."""
    reasons = {setting.field: setting.reason for setting in plan.resolved}
    return {
        name: {"value": _as_json(value), "source": _source(plan.config, sources.get(name, "default"))}
        | ({"source": "derived", "reason": reasons[name]} if name in reasons else {})
        for name, value in plan.config
        if name != "launch_settings"
    }


def _source(config: ServerConfig, source: str) -> str:
    """The source of a setting; `tuned` for a file that names its study."""
    return "tuned" if source == "file" and config.tuned_by is not None else source


def logger_level(log_level: str) -> str:
    """The model server's name for the level of a log filter such as `info,text_generation_router=debug`."""
    levels = [word.rpartition("=")[2].strip().lower() for word in log_level.split(",")]
    ranks = list(_LOGGER_LEVELS)
    known = [level for level in levels if level in _LOGGER_LEVELS]
    return _LOGGER_LEVELS[min(known, key=ranks.index)] if known else "INFO"


def _shard_settings(shard: ShardConfig) -> dict[str, str]:
    """Settings passed by variable: those that differ from the default, and a few always."""
    found = {
        variables_of(name, field)[0]: text_of(value)
        for name, field in ShardConfig.model_fields.items()
        if name not in SHARD_FLAGS
        and variables_of(name, field)
        and (value := getattr(shard, name)) not in (None, (), field.default)
    }
    found.pop("LOG_LEVEL", None)
    found.pop("ENABLE_PREFILL_LOGPROBS", None)
    found.pop("COMPUTE_THREADS", None)
    return {
        **found,
        "CUDA_MEMORY_FRACTION": text_of(shard.cuda_memory_fraction),
        "PREFIX_CACHING": "true" if shard.prefix_caching else "0",
        **({"REQUEST_LOGPROBS": "1"} if shard.enable_prefill_logprobs else {}),
        **({"DISABLE_CUSTOM_KERNELS": "True"} if shard.disable_custom_kernels else {}),
        **({"OMP_NUM_THREADS": str(shard.compute_threads)} if shard.compute_threads else {}),
        **({"ROPE_FACTOR": text_of(shard.rope_factor).removesuffix(".0")} if shard.rope_factor else {}),
        **_hub_variables(shard),
    }


def _process_group(
    config: ServerConfig, world_size: int, rank: int, rendezvous: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """Rank and rendezvous of a shard: a file, unless an address is configured."""
    group = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": config.master_addr or "localhost",
        "MASTER_PORT": str(config.master_port),
    }
    if world_size > 1 and config.master_addr is None:
        loopback = {name: environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        return {**group, **loopback, "RENDEZVOUS_FILE": str(rendezvous)}
    return group


def _runtime_defaults(config: ServerConfig) -> dict[str, str]:
    """Variables of libraries; the user's values take precedence."""
    always = {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "SAFETENSORS_FAST_GPU": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if not config.compute_threads:
        return always
    # Threads that spin between steps would slow the router down. A step reads every weight once: with pages of 2 MiB,
    # where the system allows them, it waits less for their addresses.
    return {**always, "OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}


def _hub_variables(config: HubConfig) -> dict[str, str]:
    values = {
        "HF_TOKEN": config.hub_token,
        "HUGGINGFACE_HUB_CACHE": config.huggingface_hub_cache,
        "WEIGHTS_CACHE_OVERRIDE": config.weights_cache_override,
    }
    return {name: text_of(value) for name, value in values.items() if value is not None}


def _inherited(environ: Mapping[str, str], config_class: type[HubConfig]) -> dict[str, str]:
    """The launcher's variables without those of settings, which are passed on resolved."""
    fields = config_class.model_fields.items()
    read = {variable for name, field in fields for variable in variables_of(name, field)}
    kept = without_ignored(environ).items()
    return {name: value for name, value in kept if name not in read and name not in _READ_BY_LAUNCHER}


def _as_json(value: object) -> object:
    match value:
        case Secret():
            return str(value)
        case Path():
            return str(value)
        case tuple():
            return list(value)
        case _:
            return value
