"""`text-generation-server`: serve one shard of a model, download its weights, or quantize it.

Only `serve` and `quantize` import torch, after the settings have been checked.
"""

import asyncio
import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import uvloop

from reference_server.adapter_source import parse_adapters
from reference_server.configuration.common_config import HubConfig
from reference_server.configuration.config import DownloadConfig, QuantizeConfig, RankConfig, ShardConfig
from reference_server.configuration.config_support import refuse_unsupported
from reference_server.configuration.ignored_variables import ignored_variables
from reference_server.configuration.settings import COMMANDS, load, load_rank, process_environment
from reference_server.errors import ArgumentError, StartupError
from reference_server.model_server.options import WIGGLE_ROOM, EngineOptions, RopeOverride
from reference_server.model_server.speculation.ngram import NgramRule
from reference_server.model_server.weights.download import Downloader, Weights
from reference_server.model_server.weights.hub import HuggingFaceHub
from reference_server.observability import LogFormat, set_up_logging
from reference_server.presets import catalog
from reference_server.transport.address import is_tcp, tcp_url, unix_url
from reference_server.transport.compute_thread import ComputeThread
from reference_server.transport.service import serving
from reference_server.transport.shard import Shard

if TYPE_CHECKING:
    from reference_server.model_server.calls.local_shard import LocalShard
    from reference_server.model_server.calls.traced_calls import StepTracing

# `__name__` is `__main__` under `python -m`.
logger = logging.getLogger("reference_server.model_server.cli")

COMMAND_NAMES = ("serve", "download-weights", "quantize")
USAGE = f"""Usage: text-generation-server COMMAND [OPTIONS]

Commands: {", ".join(COMMAND_NAMES)}. `text-generation-server COMMAND --help` lists the options of one command.

Exit codes: 0 done, or stopped by a signal while serving; 1 the model could not be served or written; 2 usage;
130 `quantize` was interrupted; 143 `quantize` was terminated."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    command, *options = (sys.argv[1:] if argv is None else argv) or [""]
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command not in COMMAND_NAMES:
        print(f"error: unknown command {command!r}\n\n{USAGE}" if command else USAGE, file=sys.stderr)
        return 2
    try:
        return _run(command, options)
    except StartupError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1


def _run(command: str, argv: Sequence[str]) -> int:
    environ = process_environment()
    config = load(COMMANDS[command], argv, environ).config
    assert isinstance(config, ShardConfig | DownloadConfig | QuantizeConfig)
    set_up_logging(config.logger_level, LogFormat.RECORD if config.json_output else LogFormat.TEXT)
    if (warning := ignored_variables(environ)) is not None:
        logger.warning("%s", warning)
    try:
        refuse_unsupported(config)
        if isinstance(config, ShardConfig):
            serve(config, load_rank(environ) if config.sharded else RankConfig())
        if isinstance(config, QuantizeConfig):
            quantize(config)
        if isinstance(config, DownloadConfig):
            download_weights(config)
    except StartupError as error:
        if config.json_output:
            # The launcher prints a log record at once, and stderr only after the process has ended.
            logger.error("%s", error)
        raise
    return 0


def download_weights(config: DownloadConfig) -> Path:
    """Download the weight files that are missing on this machine; returns their directory."""
    weights = Weights(
        model_id=config.model_id,
        revision=config.revision,
        extension=config.extension,
        override=config.weights_cache_override,
        auto_convert=config.auto_convert,
        merge_lora=config.merge_lora,
        trust_remote_code=config.trust_remote_code,
    )
    try:
        return Downloader(HuggingFaceHub(_token(config), config.huggingface_hub_cache)).ensure(weights)
    except OSError as error:
        raise StartupError(f"could not load the weights of {config.model_id}: {error}") from error


def _token(config: HubConfig) -> str | None:
    return None if config.hub_token is None else config.hub_token.get_secret_value()


def quantize(config: QuantizeConfig) -> None:
    """Write a GPTQ checkpoint of a model to a new directory; SIGTERM and Ctrl-C remove what was written."""
    download_weights(config.part(DownloadConfig))
    from reference_server.model_server.gptq.quantize_checkpoint import CalibrationSet, quantize_checkpoint
    from reference_server.model_server.gptq.round_weight import GPTQSettings

    settings = GPTQSettings(
        bits=config.bits,
        group_size=config.groupsize,
        damping=config.percdamp,
        act_order=config.act_order,
        static_groups=config.static_groups,
        symmetric=config.sym,
    )
    options = EngineOptions(
        config.model_id,
        config.revision,
        hub_cache=config.huggingface_hub_cache,
        weights_override=config.weights_cache_override,
        trust_remote_code=config.trust_remote_code,
    )
    text = functools.partial(_calibration_text, config)
    calibration_set = CalibrationSet(text, config.nsamples, config.seqlen, config.seed)
    # SystemExit unwinds the context managers, which remove partial files.
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        quantize_checkpoint(options, config.output_dir, settings, calibration_set)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except StartupError:
        raise
    except Exception as error:
        logger.exception("could not quantize the model")
        raise StartupError(f"could not quantize {config.model_id}: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _calibration_text(config: QuantizeConfig) -> str:
    from reference_server.model_server.gptq import calibration

    if config.calibration_file is not None:
        return calibration.read_text(config.calibration_file)
    if catalog.find(config.model_id) is not None:
        return calibration.read_text(catalog.CALIBRATION_TEXT)
    import huggingface_hub

    access = {"token": _token(config), "cache_dir": config.huggingface_hub_cache}
    return calibration.read_default(functools.partial(huggingface_hub.hf_hub_download, repo_type="dataset", **access))


def serve(config: ShardConfig, rank: RankConfig) -> NoReturn:
    """Load one shard and serve it until a signal arrives or a fatal error occurs.

    The process ends with `os._exit`: the interpreter's own exit would wait for a step in flight.
    """
    if rank.rank > 0 and not logger.isEnabledFor(logging.DEBUG):
        # Every rank would log the same lines.
        logging.getLogger("reference_server.model_server").setLevel(logging.WARNING)
    urls = group_urls(config, rank)
    # `urls` are the addresses that routers connect to; this rank may listen on 0.0.0.0.
    url = urls[rank.rank] if config.listen is None else tcp_url(config.listen)
    tracing = None if config.otlp_endpoint is None else _start_tracing(config, config.otlp_endpoint)
    shard = _load(config, rank, tracing)
    freeze_collector()
    code = uvloop.run(serve_until_stopped(shard, url, urls, shard.thread if offers_link(config, url) else None))
    if tracing is not None:
        tracing.flush()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _start_tracing(config: ShardConfig, endpoint: str) -> "StepTracing":
    try:
        from reference_server.model_server.calls.traced_calls import StepTracing

        return StepTracing.to(endpoint, config.otlp_service_name or "")
    except ImportError as error:
        raise StartupError(
            f"`--otlp-endpoint` needs packages that are not installed ({error.name}): pip install 'tgi-bench[otlp]'"
        ) from error


def freeze_collector() -> None:
    """Exclude all loaded objects from later garbage collections: scanning them takes 0.4 s, in the middle of a step."""
    gc.collect()
    gc.freeze()


def group_urls(config: ShardConfig, rank: RankConfig) -> list[str]:
    """The address of each rank, in rank order. Raises ArgumentError."""
    if config.listen is None:
        return [unix_url(f"{config.uds_path}-{number}") for number in range(rank.world_size)]
    try:
        own, group = tcp_url(config.listen), [tcp_url(address) for address in config.shard_addr]
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    if not group and rank.world_size == 1:
        return [own]
    if len(group) != rank.world_size:
        raise ArgumentError(f"`shard_addr` names {len(group)} shards but WORLD_SIZE is {rank.world_size}")
    return group


def engine_options(config: ShardConfig) -> EngineOptions:
    """The engine's part of the settings. An unset `prefix_caching` is off here: the launcher resolves the default."""
    rope = None
    if config.rope_scaling is not None or config.rope_factor is not None:
        rope = RopeOverride(config.rope_scaling or "linear", config.rope_factor or 1.0)
    return EngineOptions(
        model_id=config.model_id,
        revision=config.revision,
        hub_cache=config.huggingface_hub_cache,
        dtype=config.dtype,
        quantize=config.quantize,
        kv_cache_dtype=config.kv_cache_dtype,
        load_format=config.load_format,
        weights_override=config.weights_cache_override,
        memory_fraction=config.cuda_memory_fraction,
        wiggle_room=WIGGLE_ROOM if config.wiggle_room is None else config.wiggle_room,
        cpu_memory_gib=config.cpu_memory_gib,
        prefill_chunking=config.prefill_chunking,
        prefix_caching=bool(config.prefix_caching),
        request_logprobs=config.enable_prefill_logprobs,
        attention=None if config.attention == "auto" else config.attention,
        max_input_tokens=config.max_input_tokens,
        trust_remote_code=config.trust_remote_code,
        rope=rope,
        run_ahead=config.run_ahead is not False,
        compute_threads=config.compute_threads,
        watermark_gamma=config.watermark_gamma,
        watermark_delta=config.watermark_delta,
        fuse=not config.disable_custom_kernels,
        compiled_walk=config.compiled_walk,
        cuda_graphs=config.cuda_graphs,
        speculate=config.speculate,
        ngram_rule=NgramRule(config.ngram_rule),
        speculate_adaptive=config.speculate_adaptive,
        adapters=parse_adapters(config.lora_adapters, config.model_id),
        max_adapters=config.max_adapters,
        adapter_bytes=None if config.adapter_directory is None else config.adapter_memory_mib << 20,
    )


def offers_link(config: ShardConfig, url: str) -> bool:
    """Whether the shard listens for the link, as well as gRPC. Raises ArgumentError if `link` is set but impossible."""
    if not is_tcp(url):
        return config.transport != "grpc"
    if config.transport == "link":
        raise ArgumentError(f"`transport` is link, but {url} is not a unix socket: set it to auto or grpc")
    return False


async def serve_until_stopped(shard: Shard, url: str, group: Sequence[str], link: ComputeThread | None = None) -> int:
    """Serve `shard` at `url` until SIGTERM, SIGINT, SIGHUP or a fatal error; returns the exit code.

    link: the shard's thread, if it serves the link too.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(shard, url, group, link) as service:
        logger.info("Server started at %s", url)
        service.fatal.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if not service.fatal.done():
            logger.info("Signal received. Shutting down")
            return 0
        logger.critical("the shard stops after a fatal error: %s", service.fatal.result())
        return 1


def _load(config: ShardConfig, rank: RankConfig, tracing: "StepTracing | None") -> "LocalShard":
    try:
        from reference_server.model_server.models.modelling_import import import_modelling

        import_modelling()
        from reference_server.model_server.calls.local_shard import LocalShard
        from reference_server.model_server.device import choose_device
        from reference_server.model_server.distributed import Rendezvous, open_group

        open_group(
            rank.rank,
            rank.world_size,
            Rendezvous(rank.master_addr, rank.master_port, rank.rendezvous_file),
            device_type=choose_device(rank.rank).type,
        )
        traced = None if tracing is None else functools.partial(tracing.traced, rank.rank, rank.world_size)
        return LocalShard.load(engine_options(config), rank.rank, rank.world_size, traced)
    except StartupError:
        raise
    except Exception as error:
        logger.exception("could not load the model")
        raise StartupError(f"could not load {config.model_id}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
