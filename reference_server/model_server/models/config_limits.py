"""Numbers of a config.json that are out of bounds: refused before anything is built from them."""

from collections.abc import Iterator, Mapping
from typing import Any

from reference_server.errors import StartupError

# From, to, and the names that the families give it (reliability.md, T24).
LIMITS = (
    (1, 1000, ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
               "decoder_layers")),
    (1, 4096, ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads", "num_kv_heads",
               "kv_n_heads", "encoder_attention_heads", "decoder_attention_heads")),
    (0, 4096, ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts")),
    (1, 1 << 21, ("vocab_size",)),
    (1, 1 << 27, ("max_position_embeddings", "n_positions", "max_seq_len", "original_max_position_embeddings")),
    (1, 1 << 17, ("hidden_size", "n_embd", "d_model", "head_dim", "word_embed_proj_dim")),
)  # fmt: skip
_RANGES = {name: (first, last) for first, last, names in LIMITS for name in names}


def check(config: Mapping[str, Any]) -> None:
    """Raise StartupError, naming the field, for a number out of its range; nested configs included."""
    for name, value in _numbers(config):
        first, last = _RANGES[name.rpartition(".")[2]]
        if not isinstance(value, int) or not first <= value <= last:
            raise StartupError(f"config.json: `{name}` is {value!r:.40}, but has to be a number from {first} to {last}")


def _numbers(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields with a range, by their path; one that is null leaves its default to the family."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif name in _RANGES and value is not None:
            yield prefix + name, value
