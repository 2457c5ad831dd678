"""Writes `preset:tiny-llama` as a GGUF file, version 3, for llama.cpp: float32 weights and the byte-level BPE.

Source: llama.cpp's specification of the format, ggml/docs/gguf.md.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

from reference_server.model_files import locate_local

ALIGNMENT = 32
UINT32, FLOAT32, BOOL, STRING, ARRAY, INT32 = 4, 6, 7, 8, 9, 5
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Array = npt.NDArray[np.float32]


def write_gguf(path: Path) -> Path:
    """Write the model to `path`. Returns the path."""
    files = locate_local("preset:tiny-llama")
    assert files is not None, "the preset is in the package"
    config = json.loads((files.directory / "config.json").read_text())
    tokenizer = json.loads((files.tokenizer_directory / "tokenizer.json").read_text())
    weights = load_file(files.directory / "model.safetensors")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, Array] = {}
    for name, weight in weights.items():
        values = weight.float().numpy()
        rotated = next((count for projection, count in heads.items() if f".{projection}." in name), None)
        tensors[_gguf_name(name)] = values if rotated is None else _pairs_together(values, rotated)
    path.write_bytes(_file(_metadata(config) | _vocabulary(config, tokenizer), tensors))
    return path


def _metadata(config: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    return {
        "general.architecture": (STRING, "llama"),
        "general.name": (STRING, "tiny-llama"),
        "llama.block_count": (UINT32, config["num_hidden_layers"]),
        "llama.context_length": (UINT32, config["max_position_embeddings"]),
        "llama.embedding_length": (UINT32, config["hidden_size"]),
        "llama.feed_forward_length": (UINT32, config["intermediate_size"]),
        "llama.attention.head_count": (UINT32, config["num_attention_heads"]),
        "llama.attention.head_count_kv": (UINT32, config["num_key_value_heads"]),
        "llama.attention.key_length": (UINT32, config["head_dim"]),
        "llama.attention.value_length": (UINT32, config["head_dim"]),
        "llama.rope.dimension_count": (UINT32, config["head_dim"]),
        "llama.rope.freq_base": (FLOAT32, config["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, config["rms_norm_eps"]),
        "llama.vocab_size": (UINT32, config["vocab_size"]),
    }


def _vocabulary(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {each["content"] for each in tokenizer["added_tokens"]}
    return {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        # Digits stand alone, the rest is split as by GPT-2.
        "tokenizer.ggml.pre": (STRING, "smollm"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (
            ARRAY,
            (INT32, [CONTROL_TOKEN if each in special else NORMAL_TOKEN for each in tokens]),
        ),
        "tokenizer.ggml.merges": (ARRAY, (STRING, [" ".join(pair) for pair in tokenizer["model"]["merges"]])),
        "tokenizer.ggml.bos_token_id": (UINT32, config["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": (UINT32, config["eos_token_id"]),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
    }


def _gguf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module in OUTER_NAMES:
        return f"{OUTER_NAMES[module]}.{leaf}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[inner]}.{leaf}"


def _pairs_together(weight: Array, heads: int) -> Array:
    """Reorder rows: llama.cpp rotates neighbouring elements of a head, Transformers those half a head apart."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _file(metadata: Mapping[str, tuple[int, Any]], tensors: Mapping[str, Array]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(
        _text(key) + struct.pack("<I", kind) + _value(kind, value) for key, (kind, value) in metadata.items()
    )
    data = b""
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        data += _padded(tensor.astype("<f4").tobytes())
    return _padded(head) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], value)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % ALIGNMENT)
