"""Reads settings: defaults < --config-file < environment < flags. Only this module reads the environment.

Fields are declared in `config.py`; a command's flags, variables, TOML keys and `--help` follow from them.
"""

import argparse
import difflib
import functools
import inspect
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Generic, Literal, NoReturn, TypeVar

import pydantic
from pydantic.fields import FieldInfo

from reference_server.configuration.common_config import HubConfig
from reference_server.configuration.config import (
    COMMAND_DEFAULTS,
    SCHEMA_V2_DEFAULTS,
    DownloadConfig,
    QuantizeConfig,
    RankConfig,
    RouterConfig,
    ServerConfig,
    ShardConfig,
)
from reference_server.configuration.config_benchmark import BenchmarkConfig
from reference_server.configuration.config_fields import (
    flag_of,
    is_switch,
    no_flag_of,
    source_of,
    text_of,
    variables_of,
)
from reference_server.configuration.settings_help import describe, epilog, groups
from reference_server.errors import ArgumentError

Config = TypeVar("Config", bound=HubConfig)
Origin = Literal["default", "file", "environment", "flag"]

COMMANDS: Mapping[str, type[HubConfig]] = {
    "launcher": ServerConfig,
    "router": RouterConfig,
    "serve": ShardConfig,
    "download-weights": DownloadConfig,
    "quantize": QuantizeConfig,
    "benchmark": BenchmarkConfig,
}
PROGRAMS = {
    "launcher": "text-generation-launcher",
    "router": "text-generation-router",
    "serve": "text-generation-server serve",
    "download-weights": "text-generation-server download-weights",
    "quantize": "text-generation-server quantize",
    "benchmark": "text-generation-benchmark",
}


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Config]):
    """A configuration and the origin of every field's value."""

    config: Config
    sources: Mapping[str, Origin]


def load(config_class: type[Config], argv: Sequence[str], environ: Mapping[str, str]) -> Loaded[Config]:
    """Read the settings of one command.

    A flag, variable or key that cannot be read is a usage error: text on stderr and `SystemExit(2)`.
    Raises `ArgumentError` if the values do not fit together.
    """
    parser = _parser(config_class)
    flags = parser.read(argv)
    variables = _read_environment(config_class, environ, parser)
    path = flags.get("config_file", variables.get("config_file"))
    file = _read_file(config_class, Path(str(path)), parser) if path is not None else {}
    layers: dict[Origin, Mapping[str, object]] = {
        "default": COMMAND_DEFAULTS.get(config_class.command, {}),
        "file": file,
        "environment": variables,
        "flag": flags,
    }
    values = {name: value for layer in layers.values() for name, value in layer.items()}
    sources = {name: origin for origin, layer in layers.items() for name in layer}
    config = _validate(config_class, values, sources, parser)
    return Loaded(config, {name: sources.get(name, "default") for name in config_class.model_fields})


def load_rank(environ: Mapping[str, str]) -> RankConfig:
    """The rank of this process. Raises `ArgumentError` naming a missing or wrong variable."""
    names = {name: name.upper() for name in RankConfig.model_fields}
    values = {name: environ[variable] for name, variable in names.items() if environ.get(variable)}
    for name in ("rank", "world_size", "master_addr", "master_port"):
        if name not in values:
            raise ArgumentError(f"`--sharded` needs the environment variable {names[name]}")
    try:
        return RankConfig.model_validate(values)
    except pydantic.ValidationError as error:
        raise ArgumentError(_message(error.errors()[0])) from error


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for `load` and for child processes."""
    return dict(os.environ)


def visible_devices(environ: Mapping[str, str]) -> str | None:
    """The list of visible devices: the first of its variables that is set."""
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        if name in environ:
            return environ[name]
    return None


class _Parser(argparse.ArgumentParser):
    """argparse over the fields of a config class; pydantic reads the values."""

    def __init__(self, config_class: type[HubConfig], program: str) -> None:
        super().__init__(
            prog=program,
            usage=f"{program}{_positional(config_class)} [OPTIONS]",
            description=inspect.getdoc(config_class),
            epilog=epilog(config_class),
            allow_abbrev=False,
            add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.config_class = config_class
        general = self.add_argument_group("General")
        general.add_argument("-h", "--help", action="help", help="Print this and exit.")
        general.add_argument(
            "-V", "--version", action="version", version=f"{program} {_version()}", help="Print the version and exit."
        )
        for title, names in groups(config_class):
            group = self.add_argument_group(title)
            for name in names:
                self._add(group, name, config_class.model_fields[name])

    def read(self, argv: Sequence[str]) -> dict[str, object]:
        """The fields that `argv` sets."""
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return vars(namespace)

    def _add(self, group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
        source = source_of(field)
        text = describe(self.config_class, name).replace("%", "%%")
        if source.positional:
            group.add_argument(name, metavar=name.upper(), help=text)
            return
        if not source.flag:
            return
        words = [f"-{source.short}"] if source.short else []
        if not is_switch(field):
            group.add_argument(
                *words, flag_of(name), dest=name, metavar=_metavar(field), default=argparse.SUPPRESS, help=text,
                action="append" if source.repeated else "store",
            )  # fmt: skip
            return
        switch = {"dest": name, "default": argparse.SUPPRESS, "action": "store_const"}
        group.add_argument(*words, flag_of(name), const=True, help=text, **switch)  # type: ignore[arg-type]
        if self.config_class.command not in ("launcher", "router"):
            group.add_argument(no_flag_of(name), const=False, help=argparse.SUPPRESS, **switch)  # type: ignore[arg-type]

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument '{word}'"
        return f"unexpected argument '{word}'{_nearest(word, self._option_string_actions)}"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n\nUsage: {self.usage}\n\nFor more information, try '--help'.\n")


@functools.cache
def _parser(config_class: type[HubConfig]) -> _Parser:
    return _Parser(config_class, PROGRAMS[config_class.command])


def _read_environment(config_class: type[HubConfig], environ: Mapping[str, str], parser: _Parser) -> dict[str, object]:
    """The fields that variables set. An empty variable counts as unset."""
    found: dict[str, object] = {}
    for name, field in config_class.model_fields.items():
        variable = next((key for key in variables_of(name, field) if environ.get(key)), None)
        if variable is None:
            continue
        text = environ[variable]
        words = _booleans(field)
        if words and text.lower() not in words:
            parser.error(f"invalid value '{text}' for the variable {variable}: one of {', '.join(words)}")
        found[name] = words[text.lower()] if words else text
    return found


def _read_file(config_class: type[HubConfig], path: Path, parser: _Parser) -> dict[str, object]:
    """The keys of a TOML file that this command has; a file may have the keys of all commands."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        parser.error(f"--config-file {path}: {error}")
    known = {name for command in COMMANDS.values() for name in command.model_fields}
    for key in content:
        if key not in known:
            parser.error(f"--config-file {path}: unknown key '{key}'{_nearest(key, known)}")
    return {key: value for key, value in content.items() if key in config_class.model_fields}


def _validate(
    config_class: type[Config], values: Mapping[str, object], sources: Mapping[str, Origin], parser: _Parser
) -> Config:
    try:
        config = config_class.model_validate(values)
        if isinstance(config, RouterConfig) and config.grpc_schema == "v2":
            unset = {name: value for name, value in SCHEMA_V2_DEFAULTS.items() if getattr(config, name) is None}
            config = config_class.model_validate({**values, **unset})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise ArgumentError(_message(first)) from None
        name = str(first["loc"][0])
        if first["type"] == "missing":
            parser.error(f"the flag '{flag_of(name)}' is required")
        parser.error(f"{_place(config_class, name, values.get(name), sources.get(name))}: {_message(first)}")
    return config


def _place(config_class: type[HubConfig], name: str, value: object, origin: Origin | None) -> str:
    """The flag, variable or key of a wrong value, with the value."""
    field = config_class.model_fields[name]
    text = "***" if "Secret" in str(field.annotation) else _joined(value)
    match origin:
        case "environment":
            return f"invalid value '{text}' for the variable {'/'.join(variables_of(name, field))}"
        case "file":
            return f"invalid value '{text}' for the key '{name}'"
        case _:
            return f"invalid value '{text}' for '{name.upper() if source_of(field).positional else flag_of(name)}'"


def _joined(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else text_of(value)


def _message(error: object) -> str:
    """The line of a pydantic error; errors of our own validators unchanged."""
    assert isinstance(error, dict)
    cause = error.get("ctx", {}).get("error")
    return str(cause) if isinstance(cause, ValueError) else str(error["msg"])


def _booleans(field: FieldInfo) -> Mapping[str, bool]:
    """The words of a boolean field's variable; empty for other fields."""
    if field.annotation is not bool and field.annotation != bool | None:
        return {}
    words = {"true": True, "false": False}
    return words | {"1": True, "0": False} if source_of(field).digits else words


def _positional(config_class: type[HubConfig]) -> str:
    names = [name for name, field in config_class.model_fields.items() if source_of(field).positional]
    return "".join(f" {name.upper()}" for name in names)


def _metavar(field: FieldInfo) -> str:
    text = str(field.annotation)
    kinds = {"Literal": "CHOICE", "bool": "true|false", "tuple": "LIST", "Path": "PATH", "int": "N", "float": "X"}
    return next((metavar for word, metavar in kinds.items() if word in text), "TEXT")


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; the nearest valid one is '{close[0]}'" if close else ""


def _version() -> str:
    try:
        return metadata.version("tgi-bench")
    except metadata.PackageNotFoundError:
        return "(not installed)"
