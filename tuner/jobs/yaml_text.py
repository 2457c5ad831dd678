"""Renders plain values as YAML. Strings are quoted as in JSON, so YAML cannot parse them as another type."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tuner.servers.exported_text import comment_lines


def yaml_text(value: Mapping[str, Any], comments: tuple[str, ...] = ()) -> str:
    """A mapping as a YAML document below comment lines.

    >>> print(yaml_text({"spec": {"ports": [{"name": "a", "port": 80}], "ready": True, "none": {}}}, ("one",)), end="")
    # one
    spec:
      ports:
        - name: "a"
          port: 80
      ready: true
      none: {}
    """
    return "\n".join([*comment_lines(comments), *_mapping(value)]) + "\n"


def _mapping(value: Mapping[str, Any]) -> Iterator[str]:
    for key, each in value.items():
        match each:
            case Mapping() if each:
                yield f"{key}:"
                yield from (f"  {line}" for line in _mapping(each))
            case list() if any(isinstance(item, Mapping) for item in each):
                yield f"{key}:"
                for item in each:
                    first, *rest = _mapping(item)
                    yield f"  - {first}"
                    yield from (f"    {line}" for line in rest)
            case _:
                yield f"{key}: {json.dumps(each)}"
