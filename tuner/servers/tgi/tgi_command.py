"""The launch command of a TGI configuration: the bundled launcher, TGI's launcher or container, or any command."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError
from loadgen.target.launched.launch import find_launcher, split_command
from reference_server.configuration.config import ServerConfig
from reference_server.configuration.config_fields import flag_words, text_of
from tuner.config import ServerSection
from tuner.servers.launch_command import CIDFILE, LaunchCommand

LABEL = "tgi-tune"
# Settings that TGI reads only from the environment.
BY_VARIABLE = ("prefill_chunking", "prefix_caching", "attention")
# Settings that only the bundled server has.
BUNDLED_ONLY = frozenset(
    (
        *("cpu_memory_gib", "compute_threads", "run_ahead", "load_format", "step_trace", "tuned_by", "grpc_schema"),
        *("check_invariants", "step_timeout", "disable_custom_kernels", "transport", "compiled_walk"),
        *(
            "auth_all_routes",
            "max_requests_per_client",
            "allow_image_fetch",
            "max_image_fetch_size",
            "image_fetch_hosts",
        ),
        *("vertex", "kserve", "plain_text_decode_errors", "num_nodes", "node_rank", "no_shards", "shard_addr"),
        *("max_queue_time", "api_key_file", "shutdown_delay", "speculate_adaptive", "ngram_rule"),
    )
)
# Values that only the bundled server has, of settings that TGI has too.
BUNDLED_VALUES: Mapping[str, frozenset[Any]] = {"quantize": frozenset(("int4",))}
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def launch_command_of(server: ServerSection, config: ServerConfig, directory: Path) -> LaunchCommand:
    """The command for a configuration. Raises UsageError for a setting that the target does not have."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, server.gpus))} if server.gpus else {}
    match server.kind:
        case "own":
            return LaunchCommand((find_launcher(), *config.to_argv()), {**config.to_environ(), **visible})
        case "tgi-launcher":
            launcher = server.command or shutil.which("text-generation-launcher")
            if launcher is None:
                raise UsageError("PATH has no text-generation-launcher: set `command` in [server]")
            words, environment = tgi_words(config)
            return LaunchCommand((*split_command(launcher), *words), {**environment, **visible})
        case "tgi-docker":
            container = directory / CIDFILE
            return LaunchCommand(tuple(docker_command(server, config, container)), {}, container)
        case _:
            return _command_launch(server, config, visible)


def tgi_words(config: ServerConfig) -> tuple[list[str], dict[str, str]]:
    """The flags and environment variables of a TGI launcher for a configuration.

    Raises UsageError for a setting that TGI does not have.
    """
    fields = type(config).model_fields
    changed = [name for name in fields if getattr(config, name) not in (None, fields[name].default)]
    unsupported = sorted(BUNDLED_ONLY.intersection(changed))
    if unsupported:
        names = ", ".join(f"`{name}`" for name in unsupported)
        raise UsageError(f"TGI has no {names}: remove it from the study")
    for name, values in BUNDLED_VALUES.items():
        if getattr(config, name) in values:
            raise UsageError(f"TGI has no `{name}` {getattr(config, name)}: remove this value from the study")
    environment = config.to_environ()
    words: list[str] = []
    for name in changed:
        if name in BY_VARIABLE:
            environment[name.upper()] = text_of(getattr(config, name))
        elif name.upper() not in environment:
            words += flag_words(name, fields[name], getattr(config, name))
    return words, environment


def is_bundled_only(name: str, value: object) -> bool:
    """Whether TGI lacks the setting or this value of it."""
    return name in BUNDLED_ONLY or value in BUNDLED_VALUES.get(name, ())


def docker_command(
    server: ServerSection, config: ServerConfig, cidfile: Path | None, port: str = "{port}"
) -> list[str]:
    """The `docker run` command of a TGI container. Its port is published only on the loopback interface."""
    words, environment = tgi_words(config)
    gpus = ["--gpus", f'"device={",".join(map(str, server.gpus))}"' if server.gpus else "all"]
    return [
        *("docker", "run", "--rm", "--label", LABEL),
        *(("--cidfile", str(cidfile)) if cidfile is not None else ()),
        *gpus,
        *("--shm-size", server.shm_size, "-p", f"127.0.0.1:{port}:80"),
        *(("-v", server.volume) if server.volume else ()),
        *(word for name, value in environment.items() for word in ("-e", f"{name}={value}")),
        server.image,
        *words,
    ]


def _command_launch(server: ServerSection, config: ServerConfig, visible: dict[str, str]) -> LaunchCommand:
    """`command` with each `{setting}` replaced. Settings that are not at their default are also variables."""
    fields = type(config).model_fields
    environment = {
        name.upper(): text_of(getattr(config, name))
        for name in fields
        if getattr(config, name) not in (None, fields[name].default)
    }

    def value(match: "re.Match[str]") -> str:
        name = match[1]
        if name == "port":
            return "{port}"
        if name not in fields:
            raise UsageError(f"`command` in [server] has `{{{name}}}`, which is not a setting of the launcher")
        return text_of(getattr(config, name)) if getattr(config, name) is not None else ""

    words = [_PLACEHOLDER.sub(value, word) for word in split_command(server.command or "")]
    return LaunchCommand(tuple(words), {**environment, **visible})
