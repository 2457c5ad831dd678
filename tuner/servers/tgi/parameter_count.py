"""Counts the parameters of a decoder from its config.json.

The count is exact for the families listed here. The launcher's defaults use TGI's estimate, `ModelFacts.weight_bytes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reference_server.launcher.model_facts import ModelFacts
from tuner.errors import ModelSizeError

# Fields of config.json, with their names in older families.
OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions",),
}
REQUIRED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Parts of a family's decoder that its config.json does not contain.

    mlp_matrices: matrices of one MLP. layer_norms: vectors of hidden size in a layer. outer_norms: those outside the
    layers. head_norms: vectors of head size in a layer. extra_positions: rows of the position table in addition to
    `max_position_embeddings`; None without a table. is_tied: whether embedding and head share weights by default.
    """

    mlp_matrices: int = 3
    has_qkv_bias: bool = False
    has_bias: bool = False
    layer_norms: int = 2
    head_norms: int = 0
    outer_norms: int = 1
    extra_positions: int | None = None
    is_tied: bool = False
    has_head_bias: bool = False


_LLAMA = DecoderParts()
_GPT = DecoderParts(mlp_matrices=2, has_qkv_bias=True, has_bias=True, layer_norms=4, outer_norms=2)

PARTS: Mapping[str, DecoderParts] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "granite": _LLAMA,
    "phi3": _LLAMA,
    "qwen2": DecoderParts(has_qkv_bias=True),
    "qwen3": DecoderParts(head_norms=2),
    "gemma": DecoderParts(is_tied=True),
    "gemma2": DecoderParts(layer_norms=4, is_tied=True),
    "gemma3_text": DecoderParts(layer_norms=4, head_norms=2, is_tied=True),
    "gpt2": replace(_GPT, is_tied=True, extra_positions=0),
    "gpt_neox": _GPT,
    "phi": replace(_GPT, layer_norms=2, has_head_bias=True),
    "starcoder2": replace(_GPT, is_tied=True),
    "opt": replace(_GPT, is_tied=True, extra_positions=2),
    "bloom": replace(_GPT, is_tied=True, outer_norms=4),
}


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Number of parameters by part. `mlp`: only dense MLPs. `vectors`: norms, biases, routers and positions."""

    attention: int
    keys_values: int
    mlp: int
    experts: int
    vocabulary: int
    vectors: int

    @property
    def total(self) -> int:
        return self.attention + self.keys_values + self.mlp + self.experts + self.vocabulary + self.vectors


def with_common_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the field names of newer families. The default size of an MLP is four times the hidden size.

    >>> with_common_names({"n_layer": 2, "n_embd": 8})["intermediate_size"]
    32
    """
    named = dict(config)
    for name, others in OTHER_NAMES.items():
        found = next((config[other] for other in (name, *others) if config.get(other) is not None), None)
        if found is not None:
            named[name] = found
    if named.get("intermediate_size") is None and isinstance(named.get("hidden_size"), int):
        named["intermediate_size"] = 4 * named["hidden_size"]
    return named


def count_parameters(config: Mapping[str, Any]) -> ParameterCount:
    """The parameter count of a config from `with_common_names`.

    Raises ModelSizeError for a missing number, and for an unknown family or variant.
    """
    parts = _parts(config)
    facts = ModelFacts.parse(config)
    layers, heads, hidden, vocab = (_number(config, name) for name in REQUIRED)
    inner, kv_heads = _number(config, "intermediate_size"), facts.num_kv_heads or heads
    if facts.head_dim is None:
        raise ModelSizeError(
            f"`hidden_size` is {hidden}, not a multiple of `num_attention_heads` {heads}: set `head_dim`"
        )
    queries, keys = heads * facts.head_dim, kv_heads * facts.head_dim
    mlp = parts.mlp_matrices * hidden * inner
    experts = facts.num_experts if facts.num_experts > 1 else 0
    vectors = parts.layer_norms * hidden + parts.head_norms * facts.head_dim + experts * hidden
    if _has(config, "attention_bias", parts.has_qkv_bias):
        vectors += queries + 2 * keys
    if _has(config, "attention_bias", parts.has_bias):
        vectors += hidden
    if _has(config, "mlp_bias", parts.has_bias):
        vectors += (parts.mlp_matrices - 1) * inner + hidden
    outer = parts.outer_norms * hidden + (vocab if parts.has_head_bias else 0)
    if parts.extra_positions is not None:
        outer += (_number(config, "max_position_embeddings") + parts.extra_positions) * hidden
    return ParameterCount(
        attention=layers * 2 * queries * hidden,
        keys_values=layers * 2 * keys * hidden,
        mlp=0 if experts else layers * mlp,
        experts=layers * experts * mlp,
        vocabulary=(1 if _has(config, "tie_word_embeddings", parts.is_tied) else 2) * vocab * hidden,
        vectors=layers * vectors + outer,
    )


def _parts(config: Mapping[str, Any]) -> DecoderParts:
    model_type = str(config.get("model_type"))
    if model_type not in PARTS:
        raise ModelSizeError(
            f"`model_type` is {model_type}, but parameters can be counted only for {', '.join(sorted(PARTS))}"
        )
    projected = config.get("word_embed_proj_dim")
    if projected not in (None, config.get("hidden_size")):
        raise ModelSizeError(
            f"`word_embed_proj_dim` is {projected}, but must equal `hidden_size` {config.get('hidden_size')}"
        )
    parts = PARTS[model_type]
    has_bias = next((config[name] for name in ("use_bias", "enable_bias") if config.get(name) is not None), None)
    return parts if has_bias is None else replace(parts, has_qkv_bias=has_bias, has_bias=has_bias)


def _has(config: Mapping[str, Any], name: str, default: bool) -> bool:
    found = config.get(name)
    return default if found is None else bool(found)


def _number(config: Mapping[str, Any], name: str) -> int:
    found = config.get(name)
    if not isinstance(found, int) or found < 1:
        raise ModelSizeError(f"`{name}` in config.json is {found!r:.40}, but must be a number above 0")
    return found
