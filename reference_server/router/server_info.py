"""Properties of the server: `/info`, `/v1/models`, `/config` and the fingerprint in OpenAI answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any
from urllib.parse import parse_qs

from reference_server.configuration.config import RouterConfig
from reference_server.configuration.config_fields import Secret
from reference_server.configuration.settings import Loaded
from reference_server.errors import ArgumentError
from reference_server.images.placeholder import WHOLE_PROMPTS
from reference_server.messages import ModelInfo, WarmupReply
from reference_server.router.tokenizer_files import TokenizerFiles
from reference_server.router.validation.request_rules import GenerationLimits
from reference_server.router.validation.token_limits import TokenLimits, block_size_of

#: Extensions to TGI's API, listed in `/info` for clients.
EXTENSIONS = ("ignore_eos_token", "ignore_eos", "min_new_tokens", "presence_penalty", "n", "config", "cached_tokens")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of the model server; None if it does not report them."""

    backend: str | None = None
    prefill_attention: str | None = None
    decode_attention: str | None = None
    kernels: tuple[str, ...] | None = None
    dtype: str | None = None
    quantize: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    """Tokens of a block of K/V; the prefix cache contains whole blocks."""
    tuned: Mapping[str, Any] | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes reported by warm-up; in step traces, not in `/info`."""

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "attention": {"prefill": self.prefill_attention, "decode": self.decode_attention},
            "kernels": None if self.kernels is None else list(self.kernels),
            "dtype": self.dtype,
            "quantize": self.quantize,
            "kv_cache_dtype": self.kv_cache_dtype,
            "block_size": self.block_size,
            "extensions": list(EXTENSIONS),
            "tuned": None if self.tuned is None else dict(self.tuned),
        }


@dataclass(frozen=True, slots=True)
class Platforms:
    """Cloud platforms whose routes are served, and the two paths that Vertex AI chooses."""

    vertex: bool = False
    kserve: bool = False
    predict_route: str | None = None
    health_route: str | None = None


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties that routes report. They do not change once the server listens."""

    model_id: str
    limits: GenerationLimits
    version: str
    max_concurrent_requests: int = 128
    validation_workers: int = 2
    max_client_batch_size: int = 4
    model_sha: str | None = None
    model_pipeline_tag: str | None = None
    sha: str | None = None
    docker_label: str | None = None
    compute_type: str = "gpu+optimized"
    engine: EngineInfo = EngineInfo()
    platforms: Platforms = Platforms()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        return f"{self.version}-{self.docker_label or 'native'}"

    @property
    def returns_full_text(self) -> bool:
        """Default of `return_full_text` on `POST /`."""
        return self.model_pipeline_tag in (None, "text-generation")

    def to_json(self, adapters: Sequence[str] = ()) -> dict[str, Any]:
        """Body of `/info`: TGI's fifteen keys, and our `engine`, with the names of the loaded adapters."""
        return {
            "model_id": self.model_id,
            "model_sha": self.model_sha,
            "model_pipeline_tag": self.model_pipeline_tag,
            "max_concurrent_requests": self.max_concurrent_requests,
            "max_best_of": self.limits.max_best_of,
            "max_stop_sequences": self.limits.max_stop_sequences,
            "max_input_tokens": self.limits.max_input_tokens,
            "max_total_tokens": self.limits.max_total_tokens,
            "validation_workers": self.validation_workers,
            "max_client_batch_size": self.max_client_batch_size,
            "router": "text-generation-router",
            "version": self.version,
            "sha": self.sha,
            "docker_label": self.docker_label,
            "engine": {**self.engine.to_json(), "adapters": list(adapters)},
        }

    def models(self, adapters: Sequence[str] = ()) -> dict[str, Any]:
        """Body of `/v1/models`: the model, then its adapters."""
        entries = [
            {"id": name, "object": "model", "created": 0, "owned_by": self.model_id}
            for name in (self.model_id, *adapters)
        ]
        return {"object": "list", "data": entries}


def server_info(
    loaded: Loaded[RouterConfig], files: TokenizerFiles, limits: TokenLimits, info: ModelInfo, reply: WarmupReply
) -> ServerInfo:
    """The properties of a router after warm-up."""
    config, backends = loaded.config, reply.backends
    model = files.read_json("config.json")
    kernels = backends.get("kernels")
    return ServerInfo(
        model_id=files.model_id,
        limits=GenerationLimits(
            max_input_tokens=limits.max_input_tokens,
            max_total_tokens=limits.max_total_tokens,
            max_best_of=config.max_best_of,
            max_stop_sequences=config.max_stop_sequences,
            max_top_n_tokens=config.max_top_n_tokens,
            may_continue=not model.get("is_encoder_decoder", False) and model.get("model_type") not in WHOLE_PROMPTS,
            vocab_size=_vocab_size(model),
        ),
        version=metadata.version("tgi-bench"),
        max_concurrent_requests=config.max_concurrent_requests,
        validation_workers=config.validation_workers,
        max_client_batch_size=config.max_client_batch_size,
        model_sha=files.sha,
        model_pipeline_tag=files.pipeline_tag,
        docker_label=config.docker_label,
        compute_type=config.compute_type or "gpu+optimized",
        platforms=Platforms(config.vertex, config.kserve, config.aip_predict_route, config.aip_health_route),
        engine=EngineInfo(
            backend=info.device_type or None,
            prefill_attention=backends.get("prefill"),
            decode_attention=backends.get("decode"),
            kernels=None if kernels is None else tuple(filter(None, kernels.split(","))),
            dtype=info.dtype.removeprefix("torch.") or None,
            quantize=None if backends.get("quantize") in ("none", "") else backends.get("quantize"),
            kv_cache_dtype=backends.get("kv_cache"),
            block_size=block_size_of(config, info),
            tuned=tuned_from(config.tuned_by),
            memory={
                name: value
                for name in ("weight_bytes", "prefill_peak_bytes", "graph_bytes")
                if (value := getattr(reply, name)) is not None
            },
        ),
        settings=described_settings(loaded, limits, backends),
    )


def tuned_from(text: str | None) -> Mapping[str, Any] | None:
    """`engine.tuned` from STUDY/TRIAL or STUDY/TRIAL/confirmed, with an optional `?gain=RATIO,LO,HI&metric=…&load=…`.

    >>> tuned_from("night/12/confirmed?gain=1.1,1.05,1.15&metric=requests_per_s&load=closed")
    ... # doctest: +NORMALIZE_WHITESPACE
    {'study': 'night', 'trial': 12, 'confirmed': True,
     'gain': {'metric': 'requests_per_s', 'ratio': 1.1, 'lo': 1.05, 'hi': 1.15}, 'load': 'closed'}
    """
    if text is None:
        return None
    origin, _, query = text.partition("?")
    study, _, trial = origin.removesuffix("/confirmed").rpartition("/")
    if not study or not trial.isdecimal():
        raise ArgumentError(f"`tuned_by` is {text!r}, not STUDY/TRIAL or STUDY/TRIAL/confirmed")
    values = {name: given[-1] for name, given in parse_qs(query).items()}
    tuned = {"study": study, "trial": int(trial), "confirmed": origin.endswith("/confirmed")}
    return tuned | ({"gain": _gain_from(values), "load": values.get("load")} if values else {})


def _gain_from(values: Mapping[str, str]) -> Mapping[str, Any] | None:
    if "gain" not in values:
        return None
    try:
        ratio, lo, hi = map(float, values["gain"].split(","))
    except ValueError as error:
        raise ArgumentError(f"the gain in `tuned_by` is {values['gain']!r}, not RATIO,LO,HI") from error
    return {"metric": values.get("metric"), "ratio": ratio, "lo": lo, "hi": hi}


def described_settings(
    loaded: Loaded[RouterConfig], limits: TokenLimits, backends: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Body of `/config`: value, source and reason of each setting; from the launcher if it started this router."""
    config = loaded.config
    if config.launch_settings is not None:
        described: dict[str, dict[str, Any]] = json.loads(config.launch_settings)
    else:
        described = {
            name: {"value": _to_json(getattr(config, name)), "source": loaded.sources[name]}
            for name in type(config).model_fields
            if name != "launch_settings"
        }
    for name in ("max_input_tokens", "max_total_tokens", "max_batch_total_tokens"):
        if getattr(config, name) != getattr(limits, name):
            reason = "determined by the model server's warm-up"
            described[name] = {"value": getattr(limits, name), "source": "derived", "reason": reason}
    if "reason" in backends and described.get("attention", {}).get("value") in (None, "auto"):
        chosen = f"{backends.get('prefill')} for prefill, {backends.get('decode')} for decode"
        described["attention"] = {"value": chosen, "source": "derived", "reason": backends["reason"]}
    return described


def _to_json(value: object) -> Any:
    """A setting as JSON, secrets masked."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Secret():
            return "***"
        case tuple():
            return [_to_json(item) for item in value]
        case _:
            return str(value)


def _vocab_size(model: Mapping[str, Any]) -> int | None:
    """Token ids of the model of this `config.json`; None without `vocab_size`."""
    text = model.get("text_config")
    size = (text if isinstance(text, dict) else model).get("vocab_size")
    return size if isinstance(size, int) else None
