"""Parses the bytes of a request body into a JSON value. A client's JSON is parsed nowhere else.

Wrong syntax, Unicode or numbers are a 400. Repeated keys of an object are recorded on the value; the schema refuses
those that it reads with 422.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import orjson
import pydantic

MAX_DEPTH = 128
MAX_DIGITS = 1000
#: Larger bodies are decoded in a thread.
INLINE_BYTES = 64 * 1024

# Only from the first digit of a run: from each of its digits, runs that are just shorter would take seconds.
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{%d}" % (MAX_DIGITS + 1))
_DETAIL_LEN = 200

Model = TypeVar("Model", bound=pydantic.BaseModel)


class MalformedJsonError(ValueError):
    """The body is not JSON, or not within this server's limits: 400."""


class WrongShapeError(ValueError):
    """The body does not match the route's schema: 422."""


class JsonObject(dict[str, Any]):
    """A JSON object that records the keys that its text repeats."""

    repeated: frozenset[str] = frozenset()

    @classmethod
    def from_pairs(cls, pairs: list[tuple[str, Any]]) -> "JsonObject":
        value = cls(pairs)
        if len(value) != len(pairs):
            seen: set[str] = set()
            value.repeated = frozenset(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return value


def decode_json(body: bytes) -> Any:
    """The value of `body`, with objects as `JsonObject`.

    Linear in the size of the body. Raises `MalformedJsonError`.
    """
    try:
        # orjson checks syntax, UTF-8, surrogates and infinities. It merges repeated keys and turns integers above
        # 64 bits into floats, so the standard library parses the value.
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedJsonError(_shorten(str(error))) from None
    if _LONG_NUMBER.search(body) and _has_long_number(body):
        raise MalformedJsonError(f"a number has more than {MAX_DIGITS} digits")
    try:
        value = _DECODER.decode(body.decode())
    except RecursionError:
        raise MalformedJsonError(f"nested deeper than {MAX_DEPTH} levels") from None
    # Every object or list opens with one of these, so most bodies need no walk.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth_exceeds(value, MAX_DEPTH):
        raise MalformedJsonError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def decode_model(model: type[Model], value: Any) -> Model:
    """`value` as an instance of `model`. Raises `WrongShapeError` naming the first field that is wrong."""
    if not isinstance(value, dict):
        raise WrongShapeError(f"expected an object, got {_type_name(value)}")
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise WrongShapeError(_shorten(_first_wrong(errors, value))) from None


def _first_wrong(errors: Sequence[Any], value: Any) -> str:
    """The first field that is wrong, with the reasons of all types that it may have."""
    first = errors[0]
    place = _resolved(first["loc"], value)
    rest = first["loc"][len(place) :]
    if not rest or (len(rest) == 1 and first["type"] == "missing"):
        return _with_place(first["loc"], _message(first))
    # The next part names a type of a union, not a key.
    of_types = [each for each in errors if each["loc"][: len(place)] == place and len(each["loc"]) > len(place)]
    reasons = [_with_place(each["loc"][len(place) + 1 :], _message(each)) for each in of_types]
    return _with_place(place, ", or ".join(dict.fromkeys(reasons)))


def _resolved(loc: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """The leading parts of `loc` that are keys and indices in `value`."""
    for depth, part in enumerate(loc):
        if not (isinstance(value, list) if isinstance(part, int) else isinstance(value, dict) and part in value):
            return loc[:depth]
        value = value[part]
    return loc


def _message(error: Any) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _with_place(place: Sequence[Any], message: str) -> str:
    return f"{'.'.join(map(str, place))}: {message}" if place else message


def decode_first(models: Sequence[type[pydantic.BaseModel]], value: Any) -> pydantic.BaseModel:
    """`value` as the first of `models` that accepts it. Raises `WrongShapeError` with the reasons of all."""
    reasons = []
    for model in models:
        try:
            return decode_model(model, value)
        except WrongShapeError as error:
            reasons.append(f"{model.__name__}: {error}")
    raise WrongShapeError(_shorten("; ".join(reasons)) if len(models) > 1 else reasons[0].partition(": ")[2])


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
    return bool(level)


def _has_long_number(body: bytes) -> bool:
    """Whether a long run of digits is outside of strings. The body is valid JSON."""
    return _LONG_NUMBER.search(_STRING.sub(b"", body)) is not None


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')


def _type_name(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "a number"


def _shorten(text: str) -> str:
    return text if len(text) <= _DETAIL_LEN else f"{text[: _DETAIL_LEN - 1]}…"


_DECODER = json.JSONDecoder(object_pairs_hook=JsonObject.from_pairs)
