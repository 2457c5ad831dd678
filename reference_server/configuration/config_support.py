"""Settings that are declared but not served yet, each with an alternative.

Every setting takes effect or is refused by name; no setting is ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reference_server.configuration.common_config import HubConfig
from reference_server.configuration.config_fields import flag_of, text_of
from reference_server.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class UnsupportedSetting:
    """`serves`: whether a value works; `instead`: the remedy for other values."""

    serves: Callable[[object], bool]
    instead: str


def _only(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


_UNSET = _only(None, (), False)

UNSUPPORTED_SETTINGS: Mapping[str, UnsupportedSetting] = {
    "attention": UnsupportedSetting(
        lambda value: value != "flashdecoding-ipex",
        "flashdecoding-ipex needs Intel's extension of torch; use auto, which selects the fastest available kernel",
    ),
    "ngrok": UnsupportedSetting(_UNSET, "run the ngrok agent on the server's machine"),
    "check_invariants": UnsupportedSetting(_UNSET, "leave it out"),
    "upload_to_model_id": UnsupportedSetting(_UNSET, "upload the directory with the hub's client"),
}


def unsupported_settings(config: HubConfig) -> list[str]:
    """A sentence for each setting of `config` that is not served."""
    return [
        f"`{flag_of(name)} {text_of(value)}` is not served yet: {setting.instead}"
        for name, setting in UNSUPPORTED_SETTINGS.items()
        if name in type(config).model_fields and not setting.serves(value := getattr(config, name))
    ]


def refuse_unsupported(config: HubConfig) -> None:
    """Raise `UnsupportedError` naming every setting that is not served."""
    sentences = unsupported_settings(config)
    if sentences:
        raise UnsupportedError("; ".join(sentences))
