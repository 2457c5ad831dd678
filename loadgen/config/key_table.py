"""The fields of a settings model as a Markdown table: name, values, default, meaning."""

import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from reports.text import markdown_table

HEAD = ("values", "default", "meaning")
BOUNDS = {"ge": "from {:.15g}", "gt": "above {:.15g}", "le": "up to {:.15g}", "lt": "below {:.15g}"}
PLAIN = {int: "int", float: "float", str: "text", bool: "true, false", Any: "any value"}
KindNames = Sequence[tuple[Any, str]]
"""Annotated types of a model and the name of each in the table, such as a number that is written as a duration."""


def key_table(model: type[BaseModel], kinds: KindNames = (), only: Iterable[str] = ()) -> Iterator[str]:
    """The lines of the table of a model's fields, in their order. only: some of the fields."""
    names = tuple(only) or tuple(model.model_fields)
    yield from markdown_table(
        ("key", *HEAD), [(f"`{key_of(model, name)}`", *cells(model, name, kinds)) for name in names]
    )


def key_tables(introduction: str, sections: Iterable[tuple[str, type[BaseModel]]]) -> Iterator[str]:
    """The lines of a page: an introduction, then a heading and a table for each model."""
    yield introduction
    for title, model in sections:
        yield f"## {title}\n"
        yield from key_table(model)


def cells(model: type[BaseModel], name: str, kinds: KindNames = ()) -> tuple[str, str, str]:
    """Values, default and meaning of one field."""
    field = model.model_fields[name]
    hint = typing.get_type_hints(model, include_extras=True)[name]
    values = " ".join(filter(None, (_kind(hint, kinds), _bounds({**_limits_in(hint), **_limits_of(field.metadata)}))))
    return values, _default(field), field.description or ""


def key_of(model: type[BaseModel], name: str) -> str:
    """The key of a field in a file."""
    return model.model_fields[name].alias or name


def _kind(hint: Any, kinds: KindNames) -> str:
    named = next((name for kind, name in kinds if kind == hint), None)
    if named is not None:
        return named
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _kind(parts[0], kinds)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_kind(part, kinds) for part in parts if part is not type(None))
    if origin is tuple:
        return "list of " + _kind(parts[0], kinds) if parts[-1] is ... else f"list of {len(parts)}"
    if origin is dict or (isinstance(hint, type) and issubclass(hint, BaseModel)):
        return "section"
    return PLAIN.get(hint, getattr(hint, "__name__", "text").lower())


def _limits_in(hint: Any) -> dict[str, float]:
    """The bounds that a type carries itself."""
    found: dict[str, float] = {}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        for part in typing.get_args(hint):
            found |= _limits_in(part)
    if typing.get_origin(hint) is typing.Annotated:
        for each in hint.__metadata__:
            found |= _limits_of(each.metadata if isinstance(each, FieldInfo) else (each,))
    return found


def _limits_of(metadata: Iterable[Any]) -> dict[str, float]:
    return {name: getattr(each, name) for each in metadata for name in BOUNDS if getattr(each, name, None) is not None}


def _bounds(limits: Mapping[str, float]) -> str:
    shown = limits.keys() - ({"ge"} if "gt" in limits else ())
    return ", ".join(text.format(limits[name]) for name, text in BOUNDS.items() if name in shown)


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required" if field.is_required() else ""
    if value in (None, "", ()) or isinstance(value, BaseModel):
        return ""
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    shown = str(value).lower() if isinstance(value, bool) else f"{value:.15g}" if isinstance(value, float) else value
    return f"`{shown}`"
