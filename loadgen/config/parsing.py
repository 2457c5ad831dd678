"""Turns flags and a TOML file into a config: flags override the file, the file overrides the defaults.

The only place that derives flags from fields and reads the environment.
"""

import argparse
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from loadgen.entry_points import Names
from loadgen.errors import UsageError
from loadgen.redaction import MASK, is_secret, redacted_text

# The mark of a field that is not a tuple but whose flag may be repeated.
REPEATABLE: JsonDict = {"is_repeatable": True}

Config = TypeVar("Config", bound=BaseModel)


def flag_name(field: str) -> str:
    """`max_in_flight` is `--max-in-flight`."""
    return "--" + field.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, cls: type[BaseModel], leave_out: Iterable[str] = ()) -> None:
    """Add one flag per field; values stay text until `load` validates them."""
    excluded = frozenset(leave_out)
    for name, field in cls.model_fields.items():
        if name not in excluded:
            default = "" if field.default in (None, "", ()) or "Default" in (field.description or "") else field.default
            text = f"{field.description} Default {default}." if default != "" else str(field.description)
            # A flag of a switch needs no value.
            switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
            parser.add_argument(
                flag_name(name),
                dest=name,
                default=None,
                action="append" if _is_repeatable(field) else "store",
                metavar=_metavar(field),
                help=text.replace("%", "%%"),
                **switch,
            )


def _is_repeatable(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is tuple or field.json_schema_extra == REPEATABLE


def _metavar(field: FieldInfo) -> str:
    if field.annotation is bool:
        return "true|false"
    choices = _names(field) or _choices(field.annotation)
    return "|".join(choices) if choices else "VALUE"


def _names(field: FieldInfo) -> tuple[str, ...]:
    """The names of a field that installed packages extend."""
    return next((each.known() for each in field.metadata if isinstance(each, Names)), ())


def _choices(annotation: Any) -> tuple[str, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(str(choice) for choice in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType):
        return tuple(choice for part in typing.get_args(annotation) for choice in _choices(part))
    return ()


def load(cls: type[Config], flags: Mapping[str, Any], file: Path | None = None) -> Config:
    """A config from a TOML file and flag values, None for absent flags. Raises UsageError."""
    values = read_toml(file) if file is not None else {}
    values |= {name: value for name, value in flags.items() if value is not None and name in cls.model_fields}
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise UsageError(describe(error)) from error


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a TOML file. Raises UsageError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML ({error})") from error


def describe(error: ValidationError) -> str:
    """One line per problem: the flag, its value and the limit."""
    lines = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            lines.append(message)
            continue
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            section = ".".join(str(part) for part in problem["loc"][:-1])
            lines.append(f"`{problem['loc'][-1]}` is not a setting of {f'[{section}]' if section else 'a load'}")
            continue
        lines.append(f"`{name}` is {_display(name, problem['input'])}: {message[:1].lower()}{message[1:]}")
    return "\n".join(lines)


def _display(name: str, value: object) -> str:
    return MASK if is_secret(name) or name.startswith("header") else redacted_text(repr(value))


def cache_directory() -> Path:
    """Where measurements of this machine are stored (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tgi-bench"


def environment(*names: str) -> dict[str, str]:
    """Those of the named environment variables that are set and not empty."""
    return {name: value for name in names if (value := os.environ.get(name))}
