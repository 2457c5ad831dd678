"""Writes a Llama saved by Transformers as a GGUF file, version 3, for llama.cpp, with its tokenizer.

    python -m benchmarks.peers.gguf_file MODEL_DIRECTORY MODEL.gguf

Weights stay bfloat16. The tokenizer must be a byte-level BPE that splits digits, like that of `preset:tiny-llama`.
Source: llama.cpp's specification of the format, ggml/docs/gguf.md.
"""

import argparse
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 32
# Types of metadata values, of tokens and of tensors.
UINT32, FLOAT32, BOOL, STRING, ARRAY, INT32 = 4, 6, 7, 8, 9, 5
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3
TENSOR_TYPES = {"float32": 0, "uint16": 30}
"""The GGUF type of a tensor, by the type of its array. Arrays of bfloat16 are stored as 16-bit integers."""
NAMES = {
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
DIGITS_THEN_GPT2 = "smollm"
"""llama.cpp's name for splitting text before BPE into single digits, then by GPT-2's regular expression."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    write_gguf(args.directory, args.file)


def write_gguf(directory: Path, path: Path, tokenizer_directory: Path | None = None) -> Path:
    """Convert the model of a directory; returns the path. The file is renamed to it when it is complete."""
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "llama":
        raise SystemExit(f"`model_type` is {config['model_type']} but only llama can be converted to GGUF")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights: dict[str, npt.NDArray[Any]] = {}
    for name, bits in tensors(directory / "model.safetensors"):
        rotated = next((count for projection, count in heads.items() if name.endswith(f".{projection}.weight")), None)
        weight = bits if rotated is None else pairs_together(bits, rotated)
        # llama.cpp requires norms in 32 bits.
        weights[gguf_name(name)] = weight if weight.ndim > 1 else (weight.astype(np.uint32) << 16).view(np.float32)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(
        file_bytes(architecture(config) | vocabulary(config, tokenizer_directory or directory), weights)
    )
    return unfinished.rename(path)


def architecture(config: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    rope = config.get("rope_parameters") or config
    return {
        "general.architecture": (STRING, "llama"),
        "llama.block_count": (UINT32, config["num_hidden_layers"]),
        "llama.context_length": (UINT32, config["max_position_embeddings"]),
        "llama.embedding_length": (UINT32, config["hidden_size"]),
        "llama.feed_forward_length": (UINT32, config["intermediate_size"]),
        "llama.attention.head_count": (UINT32, config["num_attention_heads"]),
        "llama.attention.head_count_kv": (UINT32, config["num_key_value_heads"]),
        "llama.attention.key_length": (UINT32, config["head_dim"]),
        "llama.attention.value_length": (UINT32, config["head_dim"]),
        "llama.rope.dimension_count": (UINT32, config["head_dim"]),
        "llama.rope.freq_base": (FLOAT32, rope["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, config["rms_norm_eps"]),
        "llama.vocab_size": (UINT32, config["vocab_size"]),
    }


def vocabulary(config: Mapping[str, Any], directory: Path) -> dict[str, tuple[int, Any]]:
    """Vocabulary and merges of tokenizer.json, special tokens, and the chat template."""
    content = json.loads((directory / "tokenizer.json").read_text())
    steps = [each["type"] for each in content["pre_tokenizer"].get("pretokenizers", ())]
    if content["model"]["type"] != "BPE" or steps != ["Digits", "ByteLevel"]:
        raise SystemExit(f"{directory}: the tokenizer is not a byte-level BPE that splits digits first")
    special = {each["id"]: each["content"] for each in content["added_tokens"]}
    texts = {token: text for text, token in content["model"]["vocab"].items()} | special
    tokens = [texts.get(token, f"[unused{token}]") for token in range(config["vocab_size"])]
    kinds = [CONTROL_TOKEN if token in special else NORMAL_TOKEN for token in range(len(tokens))]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    found: dict[str, tuple[int, Any]] = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, DIGITS_THEN_GPT2),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, kinds)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
    }
    for name, key in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if config.get(key) is not None:
            found[f"tokenizer.ggml.{name}_token_id"] = (UINT32, config[key])
    settings = directory / "tokenizer_config.json"
    template = json.loads(settings.read_text()).get("chat_template") if settings.exists() else None
    return found | ({"tokenizer.chat_template": (STRING, template)} if template else {})


def tensors(path: Path) -> list[tuple[str, npt.NDArray[np.uint16]]]:
    """The name and the bits of every tensor of a bfloat16 safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        first, last = entry["data_offsets"]
        found.append((name, np.frombuffer(content[start + first : start + last], np.uint16).reshape(entry["shape"])))
    return found


def gguf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module in OUTER_NAMES:
        return f"{OUTER_NAMES[module]}.{leaf}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{leaf}"


def pairs_together(weight: Any, heads: int) -> Any:
    """Reorder rows: llama.cpp rotates adjacent elements of a head, Transformers elements half a head apart."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def file_bytes(metadata: Mapping[str, tuple[int, Any]], weights: Mapping[str, npt.NDArray[Any]]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(weights), len(metadata))
    head += b"".join(
        _text(key) + struct.pack("<I", kind) + _value(kind, value) for key, (kind, value) in metadata.items()
    )
    data = b""
    for name, weight in weights.items():
        shape = weight.shape[::-1]
        head += _text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, TENSOR_TYPES[str(weight.dtype)], len(data)
        )
        data += _padded(weight.tobytes())
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


if __name__ == "__main__":
    main()
