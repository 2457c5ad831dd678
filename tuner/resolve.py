"""From what was suggested to what is launched: rules that change a value, and the key of "the same again". Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# What the launcher takes where nothing is said, as far as it can be known before a launch.
DEFAULTS: Mapping[str, Any] = {
    "max_batch_prefill_tokens": 4096,
    "max_waiting_tokens": 20,
    "prefill_chunking": True,
    "cuda_memory_fraction": 1.0,
    "waiting_served_ratio": 0.3,
    "max_concurrent_requests": 128,
    "quantize": "none",
}


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the prompt budget raised to the longest prompt where it cannot be chunked.

    >>> resolved({"prefill_chunking": False, "max_input_tokens": 1000, "max_batch_prefill_tokens": 64})
    {'prefill_chunking': False, 'max_input_tokens': 1000, 'max_batch_prefill_tokens': 1000}
    """
    budget, longest = settings.get("max_batch_prefill_tokens"), settings.get("max_input_tokens")
    if settings.get("prefill_chunking") is False and budget is not None and longest is not None and budget < longest:
        return {**settings, "max_batch_prefill_tokens": longest}
    return dict(settings)


def key_of(settings: Mapping[str, Any]) -> str:
    """A digest of resolved settings: the same configuration has the same key, however it was written.

    >>> key_of({"a": 1, "quantize": "none"}) == key_of({"quantize": None, "a": 1.0}) == key_of({"a": 1})
    True
    """
    plain = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in settings.items()
        if value not in (None, "none", "auto")
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]
