"""The numbers in a model's config.json that defaults are derived from.

Sizes follow the public launcher's formulas, so that the derived defaults are the same.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from reference_server.configuration.config_fields import Secret
from reference_server.configuration.model_config import Quantize
from reference_server.model_files import base_model, locate_local

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Fields of config.json; None if missing."""

    model_type: str | None = None
    max_position_embeddings: int | None = None
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    num_layers: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    head_dim: int | None = None
    num_experts: int = 1
    experts_per_token: int = 1
    shared_experts: int = 0
    is_encoder_decoder: bool = False
    has_vision: bool = False
    quantize: str | None = None
    rope_type: str | None = None
    rope_original_max: int | None = None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "ModelFacts":
        """Read a config.json. A quantization method without a flag is None."""
        heads = _first(config, "num_attention_heads")
        hidden = _first(config, "hidden_size", "n_embd")
        method = (config.get("quantization_config") or {}).get("quant_method")
        return cls(
            model_type=config.get("model_type"),
            max_position_embeddings=_first(config, "max_position_embeddings", "max_seq_len", "n_positions"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=_first(config, "num_key_value_heads") or heads,
            num_layers=_first(config, "num_hidden_layers"),
            intermediate_size=_first(config, "intermediate_size"),
            vocab_size=_first(config, "vocab_size"),
            head_dim=_head_dim(config, hidden, heads),
            num_experts=_first(config, "num_local_experts") or 1,
            experts_per_token=_first(config, "num_experts_per_tok") or 1,
            shared_experts=_first(config, "n_shared_experts") or 0,
            is_encoder_decoder=bool(config.get("is_encoder_decoder")),
            has_vision=config.get("vision_config") is not None,
            quantize=method if method in get_args(Quantize) else None,
            rope_type=_rope_type(config),
            rope_original_max=_rope_original_max(config),
        )

    @property
    def flop_per_token(self) -> int | None:
        """Multiply-adds of one prompt token, times two; None for vision models or if a number is missing."""
        if self.has_vision:
            return None
        match self:
            case ModelFacts(
                num_layers=int(layers), hidden_size=int(hidden), num_heads=int(heads), num_kv_heads=int(kv_heads),
                head_dim=int(head_dim), intermediate_size=int(intermediate),
            ):  # fmt: skip
                query = 2 * heads * head_dim * hidden
                key = 2 * kv_heads * head_dim * hidden
                mlp = 6 * hidden * intermediate * (self.experts_per_token + self.shared_experts)
                return layers * (query * 3 + key * 2 + mlp)
        return None

    @property
    def weight_bytes(self) -> int | None:
        """Size of the weights at two bytes each; None if a number is missing."""
        match self:
            case ModelFacts(
                num_layers=int(layers), hidden_size=int(hidden), num_heads=int(heads), num_kv_heads=int(kv_heads),
                head_dim=int(head_dim), intermediate_size=int(intermediate), vocab_size=int(vocab),
            ):  # fmt: skip
                mlp = 3 * intermediate * self.num_experts * hidden
                attention = (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
                return 2 * (layers * (mlp + attention) + 2 * hidden * vocab)
        return None

    @property
    def bytes_per_token(self) -> int | None:
        """K/V and activations of one token of a prefill; None if a number is missing."""
        match self:
            case ModelFacts(
                num_layers=int(layers), num_kv_heads=int(kv_heads), head_dim=int(head_dim), intermediate_size=int(size)
            ):
                return 4 * kv_heads * head_dim * layers + 6 * self.num_experts * (size + size // 2)
        return None

    def tokens_that_fit(self, available_bytes: float) -> int | None:
        """Prompt tokens that fit in memory with the weights; None if unknown, or if the weights do not fit."""
        if self.quantize is not None or self.weight_bytes is None or self.bytes_per_token is None:
            return None
        if self.weight_bytes > available_bytes:
            logger.warning("The weights need %d bytes of device memory, of %d", self.weight_bytes, int(available_bytes))
            return None
        return math.floor((available_bytes - self.weight_bytes) / self.bytes_per_token)


def read_model_config(
    model_id: str, revision: str | None = None, cache: Path | None = None, hub_token: Secret | None = None
) -> Mapping[str, Any] | None:
    """The model's config.json, from a preset, a directory or the hub; None, with a warning, if it cannot be read.

    That of a speculator's base model for a speculator. Raises `UnsupportedError` for a preset that does not exist.
    """
    content = _read_config(model_id, revision, cache, hub_token)
    base = base_model(content) if content is not None else None
    return content if base is None else _read_config(base, None, cache, hub_token)


def _read_config(
    model_id: str, revision: str | None, cache: Path | None, hub_token: Secret | None
) -> Mapping[str, Any] | None:
    local = locate_local(model_id)
    try:
        if local is None:
            text = _fetch_config(model_id, revision, cache, hub_token)
        else:
            text = (local.directory / "config.json").read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError, ImportError) as error:
        logger.warning("Could not read the config.json of %s: %s", model_id, _first_line(error))
        return None
    return content if isinstance(content, dict) else None


def _fetch_config(model_id: str, revision: str | None, cache: Path | None, hub_token: Secret | None) -> str:
    """From the hub's cache, or by one request: the library's retries would delay a start without network."""
    from huggingface_hub import hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers, get_session

    cached = try_to_load_from_cache(model_id, "config.json", cache_dir=cache, revision=revision)
    if isinstance(cached, str):
        return Path(cached).read_text(encoding="utf-8")
    headers = build_hf_headers(token=hub_token.get_secret_value() if hub_token else None)
    url = hf_hub_url(model_id, "config.json", revision=revision)
    try:
        response = get_session().get(url, headers=headers, timeout=HUB_TIMEOUT_S, follow_redirects=True)
        response.raise_for_status()
    except Exception as error:
        # The HTTP client, and so its exceptions, differ between releases of huggingface_hub.
        raise OSError(f"the hub cannot be reached: {_first_line(error)}") from error
    return str(response.text)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := config.get(name), int)), None)


def _rope_type(config: Mapping[str, Any]) -> str | None:
    """The kind of scaling, under any of its names."""
    rope = _rope(config)
    found = rope.get("rope_type") or rope.get("type")
    return found if isinstance(found, str) else None


def _rope_original_max(config: Mapping[str, Any]) -> int | None:
    name = "original_max_position_embeddings"
    return _first(_rope(config), name) or _first(config, name)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def _head_dim(config: Mapping[str, Any], hidden: int | None, heads: int | None) -> int | None:
    explicit = _first(config, "head_dim")
    if explicit is not None:
        return explicit
    if hidden and heads and hidden % heads == 0:
        return hidden // heads
    nested = _first(config.get("text_config") or {}, "head_dim")
    return nested if nested is not None else 256 if config.get("model_type") == "gemma3" else None
