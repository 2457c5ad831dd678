"""`text-generation-benchmark`: time the steps of a model server by batch size, print tables, write a page and JSON.

Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted, 143 terminated.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict

from reference_server.benchmark.prompt import prompt_of
from reference_server.benchmark.results import BenchmarkResult
from reference_server.benchmark.served_shard import served_shard
from reference_server.benchmark.steps import BatchTimes, StepLoad, time_batch
from reference_server.configuration.config_benchmark import BenchmarkConfig
from reference_server.configuration.settings import load, process_environment
from reference_server.errors import NOT_WARMED_UP, ArgumentError, ServerError, ShardConnectionError, ShardError
from reference_server.messages import ChooserParameters, ModelInfo
from reference_server.observability import LogFormat, set_up_logging
from reference_server.router.tokenizer_files import find_tokenizer_files
from reference_server.router.validation.token_limits import ConfiguredLimits, warmup_request
from reference_server.transport.client import connect
from reference_server.transport.shard import Shard, ShardGroup

# `__name__` is `__main__` under `python -m`.
logger = logging.getLogger("reference_server.benchmark.cli")

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
LOAD_SETTINGS = (
    "sequence_length", "decode_length", "top_n_tokens", "runs", "warmups", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "frequency_penalty", "watermark", "do_sample",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code. A signal stops it and the model server that it has started."""
    own, of_server = _split(sys.argv[1:] if argv is None else argv)
    environ = process_environment()
    try:
        config = load(BenchmarkConfig, own, environ).config
        set_up_logging(config.log_level, LogFormat.JSON if config.json_output else LogFormat.TEXT, sys.stderr)
        if of_server and not config.serve:
            raise ArgumentError(f"`{of_server[0]}` after `--` is a flag of the model server: add `--serve`")
        result = asyncio.run(_until_signal(config, of_server, environ))
    except KeyboardInterrupt:
        return INTERRUPTED
    except asyncio.CancelledError:
        return TERMINATED
    except ServerError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(result.render())
    return _write_files(config, result)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first `--`."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


async def _until_signal(
    config: BenchmarkConfig, of_server: Sequence[str], environ: Mapping[str, str]
) -> BenchmarkResult:
    """Cancel the benchmark on SIGTERM and SIGHUP, as `asyncio.run` does on SIGINT."""
    running = asyncio.ensure_future(measure(config, of_server, environ))
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    return await running


async def measure(config: BenchmarkConfig, of_server: Sequence[str], environ: Mapping[str, str]) -> BenchmarkResult:
    """Connect, or start a model server, and time every batch size. Raises ServerError."""
    step_load = await asyncio.to_thread(_step_load, config)
    async with AsyncExitStack() as held:
        path = config.master_shard_uds_path
        if config.serve:
            path = await held.enter_async_context(served_shard(config.tokenizer_name, of_server, environ))
        shard = await _connected(path, held)
        info = await shard.info()
        _check_prefix_cache(config, info)
        await _warm_up(shard, step_load, max(config.batch_size), is_new=config.serve)
        batches = {size: await _time_size(shard, step_load, size, config) for size in config.batch_size}
    return BenchmarkResult(
        model=config.tokenizer_name,
        settings={name: getattr(config, name) for name in LOAD_SETTINGS if getattr(config, name) not in (None, False)},
        shard=asdict(info) | {"shards": len(shard)},
        batches=batches,
    )


def parameters_of(config: BenchmarkConfig) -> ChooserParameters:
    """The sampling parameters; a flag that is not given is off."""
    names = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    return ChooserParameters(**given, do_sample=config.do_sample, watermark=config.watermark)


def _step_load(config: BenchmarkConfig) -> StepLoad:
    files = find_tokenizer_files(config.tokenizer_name, config.revision, config.huggingface_hub_cache)
    prompt = prompt_of(files.load_tokenizer(config.trust_remote_code), config.sequence_length)
    top_n_tokens = config.top_n_tokens or 0
    return StepLoad(prompt, config.sequence_length, config.decode_length, parameters_of(config), top_n_tokens)


async def _connected(path: str, held: AsyncExitStack) -> ShardGroup:
    try:
        group = await connect(path)
    except ShardConnectionError as error:
        raise ShardConnectionError(
            f"{error}: start `text-generation-launcher` or `text-generation-server serve` with this socket, or add "
            "`--serve`"
        ) from error
    held.push_async_callback(group.close)
    return group


def _check_prefix_cache(config: BenchmarkConfig, info: ModelInfo) -> None:
    """Raise ArgumentError if the benchmark would overwrite blocks in which a router has cached prefixes."""
    if info.use_prefix_caching and not (config.overwrite_prefix_cache or config.serve):
        raise ArgumentError(
            "the model server has a prefix cache, whose blocks the benchmark overwrites: launch it with "
            "PREFIX_CACHING=0, add `--serve`, or add `--overwrite-prefix-cache` and restart the router afterwards"
        )


async def _warm_up(shard: Shard, step_load: StepLoad, largest: int, *, is_new: bool) -> None:
    """Size the K/V cache of a model server that no router has warmed up. is_new: the benchmark has started it."""
    if not is_new:
        try:
            await time_batch(shard, step_load, 1)
        except ShardError as error:
            if NOT_WARMED_UP not in str(error):
                raise
        else:
            return
    logger.info("warming up the model server")
    tokens = step_load.prompt_tokens
    total = tokens + step_load.decode_length
    await shard.warmup(warmup_request(ConfiguredLimits(largest * tokens, tokens, total)))


async def _time_size(shard: Shard, step_load: StepLoad, size: int, config: BenchmarkConfig) -> list[BatchTimes]:
    """The times of the batches of one size, without those of the warm-ups."""
    times = [await time_batch(shard, step_load, size) for _ in range(config.warmups + config.runs)]
    logger.info("batch size %d: %d runs", size, config.runs)
    return times[config.warmups :]


def _write_files(config: BenchmarkConfig, result: BenchmarkResult) -> int:
    try:
        if config.json_file is not None:
            result.write_json(config.json_file)
        if config.html_file is not None:
            # The page needs pandas and matplotlib.
            from reference_server.benchmark.page import write_result_page

            write_result_page(result, config.html_file)
    except OSError as error:
        print(f"Error: could not write {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
