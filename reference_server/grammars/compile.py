"""A grammar as a client writes it -> the regex that the wire carries: rows 22 to 26 of http-api.md section 3.2.

What this does with a grammar may take long and much memory; worker.py is the process that does it.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jsonschema_rs

from reference_server.errors import GenerationError, ValidationError
from reference_server.grammars.keywords import SchemaError
from reference_server.grammars.regex_limits import check_regex
from reference_server.grammars.schema import ANY_OBJECT, MAX_DEPTH, regex_of_schema

MAX_SCHEMA_BYTES = 262_144

_DIALECT = {"$ref": "https://json-schema.org/draft/2020-12/schema"}


def compile_grammar(kind: str, text: str) -> str:
    """The regex of a grammar: `kind` is regex, schema (`text` is its JSON) or object, which takes no text.

    Raises ValidationError, and GenerationError for a regex that does not parse.
    """
    return _COMPILERS[kind](text)


def _compile_regex(text: str) -> str:
    check_regex(text)
    return text


def _compile_schema(text: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SCHEMA_BYTES:
        raise uncompilable(f"too complex (more than {MAX_SCHEMA_BYTES} bytes)")
    schema = _parsed(text)
    if _depth(schema) > MAX_DEPTH:
        raise uncompilable(f"too complex (deeper than {MAX_DEPTH} levels)")
    try:
        jsonschema_rs.Draft202012Validator(_DIALECT).validate(schema)
    except ValueError as error:
        raise ValidationError(f"grammar is not valid: {getattr(error, 'message', error)}") from error
    if not isinstance(schema, dict) or "properties" not in schema:
        raise ValidationError("grammar is not valid: Grammar must have a 'properties' field")
    return _compiled(schema)


def _compile_object(_: str) -> str:
    return _compiled(ANY_OBJECT)


_COMPILERS: Mapping[str, Callable[[str], str]] = {
    "regex": _compile_regex,
    "schema": _compile_schema,
    "object": _compile_object,
}


def _compiled(schema: Mapping[str, Any]) -> str:
    try:
        regex = regex_of_schema(schema)
        check_regex(regex)
    except SchemaError as error:
        raise uncompilable(str(error)) from error
    except RecursionError as error:
        raise uncompilable("too complex (references nested too deeply)") from error
    except (ValidationError, GenerationError) as error:
        raise uncompilable(error.detail.removeprefix("grammar is not valid: ")) from error
    return regex


def uncompilable(detail: str) -> ValidationError:
    return ValidationError(f"cannot compile regex from schema: {detail}")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise uncompilable(f"too complex (deeper than {MAX_DEPTH} levels)") from error
    except ValueError as error:
        raise ValidationError(f"grammar is not valid: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _depth(value: Any) -> int:
    """Levels of objects and arrays; walks level by level, as deep as it takes."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth
