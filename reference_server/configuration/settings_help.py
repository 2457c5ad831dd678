"""A field in `--help` and docs/settings.md: default, variables, range, choices."""

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from reference_server.configuration.common_config import HubConfig
from reference_server.configuration.config import COMMAND_DEFAULTS
from reference_server.configuration.config_fields import source_of, text_of, variables_of


def groups(config_class: type[HubConfig]) -> Iterator[tuple[str, list[str]]]:
    """Title and field names of each class that declares fields, the most general last."""
    remaining = set(config_class.model_fields)
    for owner in config_class.__mro__:
        names = [name for name in vars(owner).get("__annotations__", {}) if name in remaining]
        if names:
            remaining -= set(names)
            yield (owner.__doc__ or owner.__name__).splitlines()[0].rstrip(".:"), names


def describe(config_class: type[HubConfig], name: str) -> str:
    """One line for `--help`: what the field does, its choices, range, default and variables."""
    field = config_class.model_fields[name]
    facts = [f"choices: {', '.join(choices_of(field))}"] if choices_of(field) else []
    facts += [f"range: {range_of(field)}"] if range_of(field) else []
    facts += [f"default: {default_of(config_class, name)}"] if default_of(config_class, name) else []
    variables = variables_of(name, field)
    facts += [f"env: {' or '.join(variables)}"] if variables else []
    return f"{field.description} " + " ".join(f"[{fact}]" for fact in facts)


def default_of(config_class: type[HubConfig], name: str) -> str:
    """The default as text; empty if there is none."""
    value = COMMAND_DEFAULTS.get(config_class.command, {}).get(name, config_class.model_fields[name].default)
    return "" if value in (None, (), PydanticUndefined) else text_of(value)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The words that a field accepts; empty if it is not a choice."""
    for option in (field.annotation, *get_args(field.annotation)):
        if get_origin(option) is Literal:
            return get_args(option)
    return ()


def range_of(field: FieldInfo) -> str:
    """The bounds of a number, as in `> 0` or `0..65535`."""
    low = high = ""
    for item in _constraints(field):
        match item:
            case annotated_types.Ge(ge=bound):
                low = f">= {bound}"
            case annotated_types.Gt(gt=bound):
                low = f"> {bound}"
            case annotated_types.Le(le=bound):
                high = f"<= {bound}"
            case annotated_types.Lt(lt=bound):
                high = f"< {bound}"
    return ", ".join(bound for bound in (low, high) if bound)


def epilog(config_class: type[HubConfig]) -> str:
    """The last paragraphs of `--help`."""
    hidden = [
        f"  {' or '.join(variables_of(name, field))}: {field.description}"
        for name, field in config_class.model_fields.items()
        if not source_of(field).flag
    ]
    examples = "".join(f"  {line}\n" for line in config_class.examples)
    return (
        (f"Examples:\n{examples}\n" if examples else "") + "Variables without a flag:\n" + "\n".join(hidden) + "\n\n"
        "A flag overrides its variable, which overrides the key in --config-file (TOML), which overrides the\n"
        "default. Lists are comma-separated. Exit codes: 0 done, 1 failed, 2 usage."
    )


def _constraints(field: FieldInfo) -> Iterator[object]:
    yield from field.metadata
    for option in get_args(field.annotation):
        for item in getattr(option, "__metadata__", ()):
            yield from getattr(item, "metadata", ()) or (item,)
