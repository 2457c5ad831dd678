"""Reads a space file. Its relative paths are relative to the file's folder, whatever the working directory is.

Command lines, and the settings of `[server.fixed]` and `[param]`, are passed to the server unchanged.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loadgen.config import parsing
from loadgen.generator.worker_messages import FILE_SETTINGS, LENGTH_SETTINGS
from loadgen.workloads.lengths import EMPIRICAL
from tuner.errors import SpaceError
from tuner.servers.find_profile import find_profile
from tuner.servers.model_path import has_other_files, is_path

Resolve = Callable[[str, Path], str]

FILE_STORAGES = ("journal", "sqlite")


def read_space(path: Path) -> dict[str, Any]:
    """The sections of a space file. Raises UsageError."""
    content = parsing.read_toml(path)
    folder = path.parent
    for section, key, resolve in _places(content, folder):
        value = section.get(key)
        if isinstance(value, str):
            section[key] = resolve(value, folder)
    return content


def _places(content: Mapping[str, Any], folder: Path) -> list[tuple[dict[str, Any], str, Resolve]]:
    """The values that can be paths: section, key, and the function that resolves the value."""
    load, study, server, searched = (_section(content, name) for name in ("load", "study", "server", "param"))
    found: list[tuple[dict[str, Any], str, Resolve]] = [
        *((load, key, _beside) for key in ("file", *FILE_SETTINGS, "ca_file")),
        *((load, key, _lengths) for key in LENGTH_SETTINGS),
        (load, "tokenizer", _model),
        (study, "cost", _beside),
        (study, "storage", _storage),
        (server, "profile", _profile),
    ]
    if not _has_other_files(server, folder):
        prepared = (
            each
            for section in searched.values()
            if isinstance(section, dict) and isinstance(section.get("values"), list)
            for each in section["values"]
            if isinstance(each, dict)
        )
        found += [(section, "model_id", _model) for section in (server, *prepared)]
    return found


def _has_other_files(server: Mapping[str, Any], folder: Path) -> bool:
    """Whether the server runs in a container or on another machine, so that its model is not a path here."""
    command, profile = server.get("command"), server.get("profile")
    if not isinstance(command, str) and isinstance(profile, str):
        try:
            command = find_profile(_profile(profile, folder)).command
        except SpaceError:
            return False
    return server.get("kind") == "tgi-docker" or (isinstance(command, str) and has_other_files(command))


def _section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name, {})
    return section if isinstance(section, dict) else {}


def _beside(value: str, folder: Path) -> str:
    return value if folder == Path() else str(folder / value)


def _lengths(value: str, folder: Path) -> str:
    prefix = f"{EMPIRICAL}:"
    return prefix + _beside(value.removeprefix(prefix), folder) if value.startswith(prefix) else value


def _storage(value: str, folder: Path) -> str:
    kind, separator, path = value.partition(":")
    return f"{kind}:{_beside(path, folder)}" if separator and kind in FILE_STORAGES else value


def _profile(value: str, folder: Path) -> str:
    """The name of a profile is not a path."""
    return _beside(value, folder) if (folder / value).is_file() else value


def _model(value: str, folder: Path) -> str:
    """A name or hub id of a model or tokenizer is a path only if such a file or directory exists in the folder."""
    if folder == Path() or not (is_path(value) or value.endswith(".json") or (folder / value).exists()):
        return value
    path = str(folder / value)
    # A relative path with one separator would be a hub id.
    return path if path.startswith((".", "/")) else f"./{path}"
