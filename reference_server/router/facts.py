"""What the router tells about itself: `/info`, `/v1/models` and the fingerprint in OpenAI answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reference_server.router.validation import RequestLimits

#: What goes beyond TGI; clients look here before they use it.
EXTENSIONS = ("ignore_eos_token", "ignore_eos", "min_new_tokens", "presence_penalty", "n", "config", "cached_tokens")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What runs underneath; None where the model server does not say."""

    backend: str | None = None
    prefill_attention: str | None = None
    decode_attention: str | None = None
    kernels: tuple[str, ...] | None = None
    dtype: str | None = None
    quantize: str | None = None
    tuned: Mapping[str, Any] | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes that warm-up reported; for step traces, not for `/info`."""

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "attention": {"prefill": self.prefill_attention, "decode": self.decode_attention},
            "kernels": None if self.kernels is None else list(self.kernels),
            "dtype": self.dtype,
            "quantize": self.quantize,
            "extensions": list(EXTENSIONS),
            "tuned": None if self.tuned is None else dict(self.tuned),
        }


@dataclass(frozen=True, slots=True)
class Platforms:
    """Which clouds' routes are served beside the others, and the two paths that Vertex AI chooses."""

    vertex: bool = False
    kserve: bool = False
    predict_route: str | None = None
    health_route: str | None = None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Everything that routes tell, fixed once the server listens."""

    model_id: str
    limits: RequestLimits
    version: str
    max_concurrent_requests: int = 128
    validation_workers: int = 2
    max_client_batch_size: int = 4
    model_sha: str | None = None
    model_pipeline_tag: str | None = None
    sha: str | None = None
    docker_label: str | None = None
    compute_type: str = "gpu+optimized"
    adapters: tuple[str, ...] = ()
    engine: EngineFacts = EngineFacts()
    platforms: Platforms = Platforms()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        return f"{self.version}-{self.docker_label or 'native'}"

    @property
    def returns_full_text(self) -> bool:
        """Whether `POST /` puts the prompt in front when the request does not say."""
        return self.model_pipeline_tag in (None, "text-generation")

    def info(self) -> dict[str, Any]:
        """Body of `/info`: TGI's fifteen keys, and `engine`."""
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
            "engine": self.engine.to_json(),
        }

    def models(self) -> dict[str, Any]:
        """Body of `/v1/models`: the model, then its adapters."""
        entries = [
            {"id": name, "object": "model", "created": 0, "owned_by": self.model_id}
            for name in (self.model_id, *self.adapters)
        ]
        return {"object": "list", "data": entries}
