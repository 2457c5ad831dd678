"""The target of a `$ref`: always inside the same schema."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any] | bool

#: References that lead to one another.
MAX_CHAIN = 64


class SchemaError(ValueError):
    """A schema that cannot be enforced; the text names the keyword."""


@dataclass(frozen=True, slots=True)
class Resource:
    """The nearest enclosing schema with an `$id`, or the root: the base of `#`."""

    schema: Mapping[str, Any]

    def entering(self, schema: Mapping[str, Any]) -> "Resource":
        return Resource(schema) if "$id" in schema and schema is not self.schema else self

    def target(self, reference: str) -> Schema:
        """The schema that a reference leads to. Raises `SchemaError`."""
        pointer = reference.removeprefix(str(self.schema.get("$id", "")))
        if not pointer.startswith("#"):
            raise SchemaError(f"`$ref` {reference}: only references into the schema itself are supported")
        found: Any = self.schema
        for step in unquote(pointer[1:]).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise SchemaError(f"`$ref` {reference} leads nowhere") from None
        if not isinstance(found, dict | bool) or (pointer != "#" and not pointer.startswith("#/")):
            raise SchemaError(f"`$ref` {reference} leads to no schema")
        return found

    def resolved(self, schema: Schema) -> Schema:
        """`schema` with its references followed; True, any value, if it belongs to another resource."""
        for _ in range(MAX_CHAIN):
            if isinstance(schema, bool):
                return schema
            if self.entering(schema) is not self:
                return True
            if "$ref" not in schema:
                return schema
            schema = self.target(schema["$ref"])
        raise SchemaError(f"`$ref` that leads back to itself, or over more than {MAX_CHAIN} others, is not supported")
