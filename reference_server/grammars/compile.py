"""A client's grammar -> what the wire carries: a checked JSON schema for our own shard, a regex for any other.

Compiling may need much time and memory, so that grammar_worker.py runs it in a process of its own.
"""

from collections.abc import Callable
from typing import Any

from outlines_core.json_schema import build_regex_from_schema

from reference_server.errors import GenerationError, ValidationError
from reference_server.grammars.limits import check_grammar, check_regex
from reference_server.grammars.schema import read_schema, schema_error, schema_grammar
from reference_server.messages import Grammar, GrammarType

ANY_OBJECT = '{"type":"object"}'


def compile_grammar(kind: str, text: str) -> Grammar:
    """Check a grammar and return its wire form.

    kind: `regex`; `schema` or `object` (any JSON object, without a text) for a shard that compiles JSON schemas;
    `schema_regex` or `object_regex` for one that takes regexes only.
    Raises ValidationError, and GenerationError for a regex that does not parse.
    """
    match kind:
        case "regex":
            check_regex(text)
            return Grammar(text)
        case "schema" | "schema_regex":
            schema = read_schema(text)
            if not isinstance(schema, dict) or "properties" not in schema:
                raise ValidationError("grammar is not valid: Grammar must have a 'properties' field")
        case "object" | "object_regex":
            text = ANY_OBJECT
            schema = read_schema(text)
        case _:
            raise AssertionError(f"there is no kind of grammar {kind!r}")
    return _compiled_regex(text) if kind.endswith("regex") else _checked_schema(text, schema)


def _checked_schema(text: str, schema: Any) -> Grammar:
    _check_compiled(check_grammar, schema_grammar(schema))
    return Grammar(text, GrammarType.JSON)


def _compiled_regex(schema: str) -> Grammar:
    """The regex that TGI's router sends: outlines-core's, which ignores some keywords (docs/grammars.md)."""
    try:
        regex = build_regex_from_schema(schema)
    except (ValueError, TypeError, RuntimeError) as error:
        raise schema_error(str(error).partition("\n")[0]) from error
    _check_compiled(check_regex, regex)
    return Grammar(regex)


def _check_compiled(check: Callable[[str], None], grammar: str) -> None:
    try:
        check(grammar)
    except (ValidationError, GenerationError) as error:
        raise schema_error(error.detail.removeprefix("grammar is not valid: ")) from error
