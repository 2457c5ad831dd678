"""Answers that follow a JSON schema or call a tool: the share of such requests, and the check of each answer.

Answers are checked with jsonschema-rs, which the extra `grammar` installs.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError


class Kind(StrEnum):
    """The field of the API that requests the structure."""

    SCHEMA = "schema"
    TOOL = "tool"


class Validity(StrEnum):
    """The check of an answer. `CUT`: it is not complete JSON and ended at its length limit."""

    VALID = "valid"
    CUT = "cut"
    NOT_JSON = "not_json"
    NOT_IN_SCHEMA = "not_in_schema"


@dataclass(frozen=True)
class Constraint:
    """One structure: a schema, as the format of the answer or as the parameters of a tool."""

    kind: Kind
    name: str
    schema: Mapping[str, Any]

    @cached_property
    def _validator(self) -> Any:
        import jsonschema_rs

        return jsonschema_rs.validator_for(dict(self.schema))

    def check(self, text: str, finish_reason: str | None) -> Validity:
        """Whether a text is JSON of the schema."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return Validity.CUT if finish_reason == "length" else Validity.NOT_JSON
        return Validity.VALID if self._validator.is_valid(value) else Validity.NOT_IN_SCHEMA


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


# Small structures whose shortest texts fit into 64 tokens.
DEFAULT_SCHEMAS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("sentiment", _object(label={"enum": ["negative", "neutral", "positive"]}, score={"type": "integer"})),
    (
        "person",
        _object(name={"type": "string", "maxLength": 20}, age={"type": "integer", "minimum": 0, "maximum": 120}),
    ),
    ("flags", _object(spam={"type": "boolean"}, urgent={"type": "boolean"}, team={"enum": ["billing", "sales", "it"]})),
)


@dataclass(frozen=True, slots=True)
class StructuredShare:
    """`share` of the requests have a structure, `tools` of those as a tool call; drawn by the seed and the prompt."""

    share: float
    tools: float = 0.0
    schemas: Sequence[tuple[str, Mapping[str, Any]]] = DEFAULT_SCHEMAS
    seed: int = 0
    _known: dict[tuple[Kind, int], Constraint] = field(default_factory=dict)

    def of(self, prompt_id: str) -> Constraint | None:
        """The structure of a prompt's answer; None for an unconstrained one. Equal for equal seeds."""
        rng = random.Random(f"structured:{self.seed}:{prompt_id}")
        if rng.random() >= self.share:
            return None
        kind = Kind.TOOL if rng.random() < self.tools else Kind.SCHEMA
        number = rng.randrange(len(self.schemas))
        if (kind, number) not in self._known:
            self._known[kind, number] = Constraint(kind, *self.schemas[number])
        return self._known[kind, number]


def structure_of(config: BenchConfig) -> StructuredShare | None:
    """The structured requests of a load; None without any. Raises UsageError."""
    if config.structured is None:
        return None
    _check_installed()
    schemas = read_schemas(Path(config.schemas_file)) if config.schemas_file is not None else DEFAULT_SCHEMAS
    return StructuredShare(config.structured, config.structured_tools or 0.0, schemas, config.seed)


def _check_installed() -> None:
    """Raises UsageError if the package that checks answers is missing."""
    try:
        import jsonschema_rs  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "`structured` checks answers with jsonschema-rs, which is missing; install tgi-bench[grammar]"
        ) from error


def read_schemas(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The schemas of a JSONL file, each an object with `name` and `schema`. Raises UsageError naming file and line."""
    import jsonschema_rs

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`schemas_file` is {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
            name, schema = row["name"], row["schema"]
            jsonschema_rs.validator_for(schema)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{where}: not an object with `name` and a JSON `schema` ({error})") from error
        if not isinstance(name, str) or not isinstance(schema, Mapping):
            raise UsageError(f"{where}: `name` must be a string and `schema` an object")
        found.append((name, schema))
    if not found:
        raise UsageError(f"{path}: it has no schemas")
    return found
