"""Settings of TGI's launcher as plain values: defaults, adjustments, and conversion to `ServerConfig`."""

import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reference_server.configuration.config import ServerConfig
from reference_server.configuration.config_fields import Secret
from reference_server.configuration.config_support import unsupported_settings
from tuner.errors import SpaceError
from tuner.space.configuration import UNSET

# The launcher's defaults that are known before a launch.
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
    """The settings, with a prefill budget of at least the longest prompt if prompts are not chunked.

    >>> resolved({"prefill_chunking": False, "max_input_tokens": 1000, "max_batch_prefill_tokens": 64})
    {'prefill_chunking': False, 'max_input_tokens': 1000, 'max_batch_prefill_tokens': 1000}
    """
    budget, longest = settings.get("max_batch_prefill_tokens"), settings.get("max_input_tokens")
    if settings.get("prefill_chunking") is False and budget is not None and longest is not None and budget < longest:
        return {**settings, "max_batch_prefill_tokens": longest}
    return dict(settings)


def server_config(settings: Mapping[str, Any]) -> ServerConfig:
    """The launcher's configuration. Raises SpaceError with the launcher's rule that the settings violate."""
    try:
        config = ServerConfig.model_validate({name: value for name, value in settings.items() if value not in UNSET})
    except ValidationError as error:
        raise SpaceError("; ".join(_problem(problem) for problem in error.errors())) from None
    if unsupported := unsupported_settings(config):
        raise SpaceError("; ".join(unsupported))
    return config


def known_settings() -> frozenset[str]:
    return frozenset(ServerConfig.model_fields)


def _plain_types(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple):
        for each in typing.get_args(annotation):
            yield from _plain_types(each)
    else:
        yield annotation


# Settings that run code of a model's author, or that allow clients to make the server contact other machines.
RISKY_SETTINGS = frozenset(("trust_remote_code", "allow_image_fetch"))
# Settings whose value can be any text or path.
OPEN_SETTINGS = frozenset(
    name
    for name, field in ServerConfig.model_fields.items()
    if any(each in (str, Path, Secret) for each in _plain_types(field.annotation))
)


def _problem(problem: Any) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"`{problem['loc'][0]}` is {problem['input']!r}: {message}" if problem["loc"] else message
