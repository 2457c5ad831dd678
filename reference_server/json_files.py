"""JSON files of a model's author: read with limits, refused with their path."""

import json
from pathlib import Path
from typing import Any

from reference_server.errors import StartupError

MAX_BYTES = 64 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises StartupError naming the file and its fault."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        value = json.loads(content)
    except RecursionError:
        raise StartupError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} is no table of settings")
    return value
