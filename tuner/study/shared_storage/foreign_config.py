"""The parts of a study's config that affect the machine of a worker: commands, images, volumes, paths.

Every user with write access to a storage can change its studies. Therefore a worker accepts these parts only if they
are in a file on its own machine, or with `--allow-command`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loadgen.generator.worker_messages import FILE_SETTINGS, LENGTH_SETTINGS
from loadgen.workloads.lengths import EMPIRICAL
from tuner.config import ServerSection, TuneConfig
from tuner.errors import StudyError
from tuner.servers.find_profile import shipped_profiles
from tuner.servers.select import server_of

ALLOW = "--allow-command"


def check_allowed(name: str, config: TuneConfig, known: TuneConfig | None, *, is_allowed: bool) -> None:
    """Raises StudyError with the parts of a stored config that are not allowed here.

    known: config in the study's folder on this machine. Parts that equal it were allowed before.
    """
    before = local_parts(known) if known is not None else {}
    new = {key: value for key, value in local_parts(config).items() if before.get(key) != value}
    if new and not is_allowed:
        listed = "".join(f"\n  {key} = {value!r}" for key, value in new.items())
        raise StudyError(
            f"study {name} of the storage uses commands, images, volumes or paths of this machine:{listed}\n"
            f"check them, then add {ALLOW}"
        )


def local_parts(config: TuneConfig) -> dict[str, Any]:
    """Every value, by key, that runs a program, reads a file, or loads foreign code on the worker's machine."""
    server = config.server
    found: dict[str, Any] = {
        "server.command": server.command,
        "server.profile": None if server.profile in shipped_profiles() else server.profile,
        "server.image": server.image if server.kind == "tgi-docker" else None,
        "server.volume": server.volume,
        "server.kind": server.kind if server.kind == "tgi-launcher" else None,
        "server.model_id": server.model_id if is_path(server.model_id) else None,
        "quality.command": config.quality.command,
        "study.cost": config.study.cost,
        "load.file": config.load.get("file"),
    }
    found |= {f"load.{name}": value for name, value in _files_of(config.load)}
    found |= dict(_open_settings(server, config))
    return {key: value for key, value in found.items() if value is not None}


def is_path(model_id: str) -> bool:
    """Whether a model id is a path on this machine, not a preset or an id of the hub.

    >>> [is_path(each) for each in ("preset:tiny-llama", "org/model", "/data/model", "./model", "a/b/c")]
    [False, False, True, True, True]
    """
    return model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1 or Path(model_id).exists()


def _files_of(load: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in (*FILE_SETTINGS, "tokenizer", "url", "server", "api_key"):
        if load.get(name) is not None:
            yield name, load[name]
    for name in LENGTH_SETTINGS:
        if str(load.get(name, "")).startswith(f"{EMPIRICAL}:"):
            yield name, load[name]


def _open_settings(server: ServerSection, config: TuneConfig) -> Iterator[tuple[str, Any]]:
    """Fixed and searched settings whose values are any text or path, and those that run foreign code."""
    for name, value in server.fixed.items():
        if _is_open(server, name) and value is not False:
            yield f"server.fixed.{name}", value
    for name, section in config.param.items():
        models = [each["model_id"] for each in section.values if isinstance(each, Mapping)]
        if any(is_path(str(each)) for each in models):
            yield f"param.{name}.values", models
        elif _is_open(server, name):
            yield f"param.{name}", list(section.values) or section.type


def _is_open(server: ServerSection, name: str) -> bool:
    is_foreign_profile = server.profile is not None and server.profile not in shipped_profiles()
    return is_foreign_profile or server_of(server).is_open(name)
