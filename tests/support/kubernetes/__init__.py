"""The published schemas of Kubernetes objects, and the check of a manifest against them."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs


def check_manifest(content: Mapping[str, Any]) -> None:
    """Raises jsonschema_rs.ValidationError for an object that is not of its kind; unknown fields are errors."""
    _validator(content["kind"]).validate(content)


@cache
def _validator(kind: str) -> Any:
    schemas = json.loads(Path(__file__).with_name("schemas.json").read_text())
    schema = {"$defs": schemas["$defs"], "$ref": f"#/$defs/{schemas['kinds'][kind]}"}
    return jsonschema_rs.validator_for(schema)
