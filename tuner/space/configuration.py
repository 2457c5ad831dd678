"""Plain settings of a configuration: the values that mean "unset", and a key that equal configurations share."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Values of an unset setting, besides None: the server chooses.
UNSET = ("none", "auto")


def without_unset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the unset ones.

    >>> without_unset({"quantize": "none", "parallel": 4, "threads": None})
    {'parallel': 4}
    """
    return {name: value for name, value in settings.items() if value is not None and value not in UNSET}


def key_of(settings: Mapping[str, Any]) -> str:
    """A digest of resolved settings. Unset settings do not change it, and 1.0 equals 1.

    >>> key_of({"a": 1, "quantize": "none"}) == key_of({"quantize": None, "a": 1.0}) == key_of({"a": 1})
    True
    """
    plain = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in without_unset(settings).items()
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]
