"""Turns flags and a TOML file into a config: flags override the file, the file overrides the defaults.

The only place that derives flags from fields and reads the environment; `terminal/variables.py` turns variables into
words of the command line.
"""

import argparse
import os
import re
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from loadgen.entry_points import Names
from loadgen.errors import UsageError
from loadgen.redaction import MASK, is_secret, redacted_text
from loadgen.terminal.flags import Long, OneOf, Rare, Switch, section
from loadgen.terminal.suggestion import nearest

# Marks a field that is not a tuple but whose flag may be repeated.
REPEATABLE: JsonDict = {"is_repeatable": True}

METAVARS = {int: "N", float: "X"}
BOOLEANS = ("True", "False")
LONGEST_CHOICES = 24
QUOTED = re.compile(r"'([^']+)'")

Config = TypeVar("Config", bound=BaseModel)


def flag_name(field: str) -> str:
    """`max_in_flight` is `--max-in-flight`."""
    return "--" + field.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Metavar:
    """The name of a field's values in `--help`, as metadata of its type."""

    name: str


@dataclass(frozen=True, slots=True)
class Brief:
    """The part that `--help` shows of a description that is too long for it, as metadata of the field's type."""

    text: str


TIME, FILE = Metavar("TIME"), Metavar("FILE")


def add_flags(
    parser: argparse.ArgumentParser,
    cls: type[BaseModel],
    sections: Mapping[str, Iterable[str]],
    common: Collection[str],
    leave_out: Iterable[str] = (),
    helps: Mapping[str, str] | None = None,
) -> None:
    """Add one flag per field, by the sections of `--help`; values stay text until `load` validates them.

    common: fields that `--help` shows; the others are in `--help-all`. helps: texts instead of those of the fields.
    """
    excluded, own = frozenset(leave_out), helps or {}
    for title, names in sections.items():
        group = section(parser, title)
        for name in names:
            if name not in excluded:
                field = cls.model_fields[name]
                _add_flag(group, name, field, own.get(name) or help_of(field), is_common=name in common)


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo, text: str, *, is_common: bool) -> None:
    text = text.replace("%", "%%")
    brief = next((each.text for each in _metadata(field.annotation) if isinstance(each, Brief)), None)
    shown = Long.of(text, brief) if brief else text if is_common else Rare(text)
    settings: dict[str, Any] = {"dest": name, "default": None, "help": shown}
    if field.annotation is bool:
        group.add_argument(flag_name(name), action=Switch, **settings)
        return
    action = "append" if _is_repeatable(field) else "store"
    group.add_argument(flag_name(name), action=action, metavar=_metavar(name, field), **settings)


def help_of(field: FieldInfo, default: str | None = None) -> str:
    """Description, values and default. default: that of a command, instead of that of the field."""
    metadata = tuple(_metadata(field.annotation, field.metadata))
    text = str(field.description)
    if default is not None:
        text = f"{text.partition(' Default ')[0]} Default {default}."
    choices = _names(field) or _choices(field.annotation)
    if choices and not all(choice in text for choice in choices if choice != field.default):
        text += f" One of {', '.join(choices)}."
    if field.default in (None, "", ()) or "Default" in text:
        return text
    value = str(field.default)
    shown = f"{field.default:g}" if isinstance(field.default, float) else value.lower() if value in BOOLEANS else value
    return f"{text} Default {shown}{'s' if TIME in metadata else ''}."


def _is_repeatable(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is tuple or field.json_schema_extra == REPEATABLE


def _metavar(name: str, field: FieldInfo) -> str:
    """The type of a field's values: N, X, TIME, FILE, or the words of a short list."""
    choices = _names(field) or _choices(field.annotation)
    if choices:
        joined = "|".join(choices)
        return OneOf.of(joined if len(joined) <= LONGEST_CHOICES else name.upper(), choices)
    marks = [each.name for each in _metadata(field.annotation, field.metadata) if isinstance(each, Metavar)]
    if marks:
        return marks[0]
    parts = {field.annotation, *typing.get_args(field.annotation)}
    return next((metavar for kind, metavar in METAVARS.items() if kind in parts), "TEXT")


def _metadata(annotation: Any, found: Iterable[Any] = ()) -> Iterable[Any]:
    """The metadata of a field, and of the types within it."""
    yield from found
    if typing.get_origin(annotation) is typing.Annotated:
        yield from annotation.__metadata__
    for part in typing.get_args(annotation):
        yield from _metadata(part)


def _names(field: FieldInfo) -> tuple[str, ...]:
    """The names of a field that installed packages extend."""
    return next((each.known() for each in field.metadata if isinstance(each, Names)), ())


def _choices(annotation: Any) -> tuple[str, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(str(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union, typing.Annotated):
        return tuple(choice for part in typing.get_args(annotation) for choice in _choices(part))
    return ()


def load(cls: type[Config], flags: Mapping[str, Any], file: Path | None = None) -> Config:
    """A config from a TOML file and flag values, None for absent flags. Raises UsageError."""
    values = read_toml(file) if file is not None else {}
    values |= {name: value for name, value in flags.items() if value is not None and name in cls.model_fields}
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise UsageError(describe(error, cls)) from error


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a TOML file. Raises UsageError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML ({error})") from error


def describe(error: ValidationError, cls: type[BaseModel]) -> str:
    """One line per problem: the flag, its value, the limit, and the nearest known key or value."""
    lines = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            lines.append(message)
            continue
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            section_name = ".".join(str(part) for part in problem["loc"][:-1])
            owner = f"[{section_name}]" if section_name else "a load"
            meant = nearest(str(problem["loc"][-1]), _keys_of_section(cls, problem["loc"]))
            lines.append(f"`{problem['loc'][-1]}` is not a setting of {owner}{meant}")
            continue
        known = QUOTED.findall(problem["ctx"]["expected"]) if problem["type"] == "literal_error" else ()
        meant = nearest(str(problem["input"]), known)
        lines.append(f"`{name}` is {_display(name, problem['input'])}: {message[:1].lower()}{message[1:]}{meant}")
    return "\n".join(lines)


def _keys_of_section(cls: type[BaseModel], place: Iterable[int | str]) -> Iterable[str]:
    """The keys of the section that holds a key; none if that is no section of the config."""
    *sections, _ = place
    for part in sections:
        field = cls.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return ()
        cls = field.annotation
    return cls.model_fields


def _display(name: str, value: object) -> str:
    return MASK if is_secret(name) or name.startswith("header") else redacted_text(repr(value))


def cache_directory() -> Path:
    """The directory for measurements of this machine (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tgi-bench"


def environment(*names: str) -> dict[str, str]:
    """Those of the named environment variables that are set and not empty."""
    return {name: value for name in names if (value := os.environ.get(name))}


def variables(prefix: str) -> dict[str, str]:
    """The environment variables with a prefix."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}
