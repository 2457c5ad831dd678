"""Which settings are declared but not served yet, and what works instead.

A setting is either acted on or refused by name; none is ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reference_server.config import Command, HubConfig
from reference_server.config_fields import flag_of, text_of
from reference_server.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Refusal:
    """`serves` tells the values that work, for `commands` or for all; `instead` says what to do with the others."""

    serves: Callable[[object], bool]
    instead: str
    commands: tuple[Command, ...] | None = None


def _only(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


_UNSET = _only(None, (), False)

REFUSALS: Mapping[str, Refusal] = {
    "speculate": Refusal(_only(None, 0), "leave it out or give 0"),
    "kv_cache_dtype": Refusal(_UNSET, "leave it out: the cache has the compute type"),
    "lora_adapters": Refusal(_UNSET, "give one adapter as --model-id: it is merged into its base model"),
    "attention": Refusal(
        lambda value: value != "flashdecoding-ipex",
        "it is made for Intel's extension of torch; auto takes the fastest kernel that is here",
    ),
    "otlp_endpoint": Refusal(_UNSET, "give it to the router, which makes the spans", commands=("serve",)),
    "ngrok": Refusal(_UNSET, "run the ngrok agent beside the server"),
    "allow_image_fetch": Refusal(_UNSET, "no served model takes images"),
    "max_image_fetch_size": Refusal(_only(33_554_432), "no served model takes images"),
    "check_invariants": Refusal(_UNSET, "leave it out"),
    "upload_to_model_id": Refusal(_UNSET, "upload the directory with the hub's own client"),
}


def unsupported_settings(config: HubConfig) -> list[str]:
    """One sentence for each setting of `config` that is not served."""
    return [
        f"`{flag_of(name)} {text_of(value)}` is not served yet: {refusal.instead}"
        for name, refusal in REFUSALS.items()
        if name in type(config).model_fields
        and (refusal.commands is None or config.command in refusal.commands)
        and not refusal.serves(value := getattr(config, name))
    ]


def refuse_unsupported(config: HubConfig) -> None:
    """Raise `UnsupportedError` naming every setting that is not served."""
    sentences = unsupported_settings(config)
    if sentences:
        raise UnsupportedError("; ".join(sentences))
