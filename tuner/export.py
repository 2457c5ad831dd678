"""A chosen configuration as a file: `best.toml`, which the launcher reads with `--config-file`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reference_server.config import ServerConfig

BEST_FILE = "best.toml"


def render_toml(settings: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Settings as TOML below comment lines; a setting at its default is written as a comment.

    >>> print(render_toml({"port": 3000, "max_waiting_tokens": 7, "tuned_by": "s/1"}, ["found by a study"]))
    # found by a study
    <BLANKLINE>
    # port = 3000
    max_waiting_tokens = 7
    tuned_by = "s/1"
    <BLANKLINE>
    """
    lines = [f"# {comment}".rstrip() for comment in comments]
    lines.append("")
    for name, value in settings.items():
        default = ServerConfig.model_fields[name].default
        line = f"{name} = {_toml(value)}"
        lines.append(f"# {line}" if value == default else line)
    return "\n".join(lines) + "\n"


def write_best(path: Path, settings: Mapping[str, Any], comments: Sequence[str]) -> None:
    """Write `best.toml` atomically; unset settings are left out."""
    given = {name: value for name, value in settings.items() if value not in (None, "none", "auto")}
    part = path.with_name(path.name + ".part")
    part.write_text(render_toml(given, comments))
    part.replace(path)


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML refuses a bare DEL
