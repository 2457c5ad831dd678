"""Metadata of settings fields: their ranges for a tuner, and their flags and variables.

The settings themselves are declared in `config.py` and its parts, `*_config.py`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, Field, StringConstraints
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Tunable:
    """Values for a tuner to try: a range, a list of choices, or, with neither, true and false.

    In `choices`, "none" and "auto" leave the field unset. `when` and `multiple_of` have the same meaning as in a
    search-space file; `central` fields are searched by default.
    """

    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    multiple_of: int | None = None
    choices: tuple[str, ...] = ()
    when: str | None = None
    central: bool = False

    @property
    def kind(self) -> Literal["int", "float", "choice", "bool"]:
        if self.choices:
            return "choice"
        if self.low is None:
            return "bool"
        return "int" if isinstance(self.low, int) else "float"


@dataclass(frozen=True, slots=True)
class FieldSource:
    """The flag and the variables of a field, if they do not follow from its name.

    flag: whether there is a flag; a field without one is passed by variable. env: variables in order of
    precedence, `()` for none; None for the name in upper case. takes_value: `--sharded true` instead of `--sharded`.
    digits: the variable may also be `1` or `0`. repeated: the command line has the flag once for each element.
    """

    flag: bool = True
    positional: bool = False
    short: str | None = None
    env: tuple[str, ...] | None = None
    takes_value: bool = False
    digits: bool = False
    repeated: bool = False


class Secret(pydantic.Secret[str]):
    """A key or token, shown as `***`. Never part of argv."""

    def _display(self) -> str:
        return "***"


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _one(value: object) -> object:
    return [value] if isinstance(value, str) else value


Word = Annotated[str, StringConstraints(pattern=r"^[^,\s]+$")]
Words = Annotated[tuple[Word, ...], BeforeValidator(_split)]
Integers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_split)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_one)]
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
TrueOrFalse = FieldSource(takes_value=True)


def source_of(field: FieldInfo) -> FieldSource:
    """The flag and variables of `field`."""
    return next((item for item in field.metadata if isinstance(item, FieldSource)), FieldSource())


def tunables(config_class: type[BaseModel]) -> dict[str, Tunable]:
    """The fields that a tuner may change, with their values."""
    return {
        name: item
        for name, field in config_class.model_fields.items()
        for item in field.metadata
        if isinstance(item, Tunable)
    }


def flag_of(name: str) -> str:
    """The flag of a field: `max_best_of` is `--max-best-of`."""
    return "--" + name.replace("_", "-")


def no_flag_of(name: str) -> str:
    """The flag that switches a field off."""
    return "--no-" + name.replace("_", "-")


def variables_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The environment variables that set a field, in order of precedence."""
    source = source_of(field)
    if source.env is not None:
        return source.env
    return () if source.positional else (name.upper(),)


def is_switch(field: FieldInfo) -> bool:
    """Whether the flag has no value."""
    return field.annotation is bool and not source_of(field).takes_value


def argv_of(config: BaseModel, always: Collection[str] = ()) -> list[str]:
    """The command line of `config`, without the settings in `environ_of`.

    Defaults are left out, except for the fields in `always`.
    """
    fields = type(config).model_fields
    positional = [str(getattr(config, name)) for name, field in fields.items() if source_of(field).positional]
    flags = [
        word
        for name, field in fields.items()
        if not source_of(field).positional and not _by_variable(config, name, field)
        for word in flag_words(name, field, getattr(config, name), name in always)
    ]
    return positional + flags


def flag_words(name: str, field: FieldInfo, value: object, always: bool = False) -> Iterator[str]:
    """`value` as argv words; none if it is unset or, unless `always`, the default."""
    if value is None or (value == field.default and not always):
        return
    flag = flag_of(name)
    if is_switch(field):
        yield flag if value else no_flag_of(name)
        return
    values = value if isinstance(value, tuple) and source_of(field).repeated else (value,)
    for one in values:
        text = text_of(one)
        # argparse would read a value with a leading dash as a flag.
        yield from (f"{flag}={text}",) if text.startswith("-") else (flag, text)


def environ_of(config: BaseModel) -> dict[str, str]:
    """The variables that complete `argv_of`: secrets and fields without a flag."""
    return {
        variables_of(name, field)[0]: text_of(getattr(config, name))
        for name, field in type(config).model_fields.items()
        if _by_variable(config, name, field) and getattr(config, name) not in (None, field.default)
    }


def text_of(value: object) -> str:
    """A value as the text of a flag, a variable or a TOML string."""
    match value:
        case bool():
            return "true" if value else "false"
        case tuple():
            return ",".join(text_of(item) for item in value)
        case Secret():
            return value.get_secret_value()
        case _:
            return str(value)


def _by_variable(config: BaseModel, name: str, field: FieldInfo) -> bool:
    return isinstance(getattr(config, name), Secret) or not source_of(field).flag
