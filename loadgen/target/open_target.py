"""Opens the target of a config: a URL, a command, or the default server."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadgen.config.bench_config import BenchConfig
from loadgen.config.target_settings import EMBEDDED_PERMITS
from loadgen.target.access import Access
from loadgen.target.launched.file_cache import FileCache
from loadgen.target.launched.launch import find_launcher, split_command
from loadgen.target.launched.launched_target import LaunchedTarget, OnWait
from loadgen.target.target import Target
from loadgen.workloads.workload_files import check_files


def embedded_command(model_id: str) -> tuple[list[str], list[str]]:
    """The command of the default server, and the part of it that we added."""
    chosen = ["--max-concurrent-requests", str(EMBEDDED_PERMITS)]
    return [find_launcher(), "--model-id", model_id, *chosen], chosen


def server_command(config: BenchConfig) -> list[str] | None:
    """The command that a config starts; None if the server already runs."""
    if config.url is not None:
        return None
    return split_command(config.server) if config.server is not None else embedded_command(config.model_id)[0]


@contextlib.contextmanager
def open_target(config: BenchConfig, log: Path, on_wait: OnWait | None = None) -> Iterator[Target]:
    """The target of a config: a URL, a command, or the default server."""
    access = Access.of(config)
    if config.url is not None:
        yield Target(config.url, access)
        return
    check_files(config)
    command: str | Sequence[str]
    command, chosen = (config.server, []) if config.server is not None else embedded_command(config.model_id)
    launched = LaunchedTarget(
        command,
        log,
        chosen=chosen,
        ready_timeout_s=config.ready_timeout,
        api=config.api,
        access=access,
        on_wait=on_wait,
        file_cache=FileCache.of(config.file_cache, config.model_files, split_command(command)),
    )
    with launched as target:
        yield target
