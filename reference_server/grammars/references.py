"""Where a `$ref` leads: into the schema that it stands in, and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from reference_server.grammars.keywords import SchemaError
from reference_server.grammars.overlap import Schema

#: Of references that lead to one another.
MAX_CHAIN = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a schema: the nearest one around it with an `$id`, which `#` means, and the references taken since."""

    resource: Mapping[str, Any]
    references: tuple[str, ...] = ()

    def entering(self, schema: Mapping[str, Any]) -> "Place":
        return Place(schema) if "$id" in schema and schema is not self.resource else self

    def following(self, reference: str) -> "Place":
        return replace(self, references=(*self.references, reference))

    def target(self, reference: str) -> Schema:
        """The schema that a reference leads to. Raises `SchemaError`."""
        pointer = reference.removeprefix(str(self.resource.get("$id", "")))
        if not pointer.startswith("#"):
            raise SchemaError(f"`$ref` {reference}: only references into the schema itself are supported")
        found: Any = self.resource
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
        """What `schema` comes to, or True where that is written elsewhere, among other references."""
        for _ in range(MAX_CHAIN):
            if isinstance(schema, bool):
                return schema
            if self.entering(schema) is not self:
                return True
            if "$ref" not in schema:
                return schema
            schema = self.target(schema["$ref"])
        raise SchemaError("`$ref` that leads back to itself is not supported")
