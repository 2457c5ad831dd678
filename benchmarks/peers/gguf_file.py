"""Writes a Llama saved by Transformers as a GGUF file for llama.cpp, with its tokenizer.

    python -m benchmarks.peers.gguf_file MODEL_DIRECTORY MODEL.gguf

Weights are bfloat16. The tokenizer must be a byte-level BPE that splits digits, as that of `preset:tiny-llama`. The
packages `gguf` and `numpy` are enough, so that it runs in the environment of a peer.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np

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
# llama.cpp's name of the rule that splits text before BPE: single digits, then the expression of GPT-2.
DIGITS_THEN_GPT2 = "smollm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    write_gguf(args.directory, args.file)


def write_gguf(directory: Path, path: Path) -> None:
    """Convert the model of a directory; the file appears when it is complete."""
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "llama":
        raise SystemExit(f"only Llama can be converted to GGUF, not {config['model_type']}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, directory, config)
    for name, weight in tensors(directory / "model.safetensors"):
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            weight = pairs_together(weight, heads if ".q_proj" in name else kv_heads)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
            continue
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def add_tokenizer(writer: Any, directory: Path, config: dict[str, Any]) -> None:
    """Vocabulary and merges of tokenizer.json, special tokens, and the chat template."""
    content = json.loads((directory / "tokenizer.json").read_text())
    steps = [each["type"] for each in content["pre_tokenizer"].get("pretokenizers", ())]
    if content["model"]["type"] != "BPE" or steps != ["Digits", "ByteLevel"]:
        raise SystemExit(f"{directory}: the tokenizer is no byte-level BPE that splits digits first")
    special = {each["id"]: each["content"] for each in content["added_tokens"]}
    texts = {token: text for text, token in content["model"]["vocab"].items()} | special
    tokens = [texts.get(token, f"[unused{token}]") for token in range(config["vocab_size"])]
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in range(len(tokens))]
    merges = content["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(DIGITS_THEN_GPT2)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(value=True)
    template = json.loads((directory / "tokenizer_config.json").read_text()).get("chat_template")
    if template:
        writer.add_chat_template(template)


def tensors(path: Path) -> list[tuple[str, Any]]:
    """Name and float32 values of every bfloat16 tensor of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        first, last = entry["data_offsets"]
        bits = np.frombuffer(content[start + first : start + last], np.uint16).astype(np.uint32) << 16
        found.append((name, bits.view(np.float32).reshape(entry["shape"])))
    return found


def gguf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module in OUTER_NAMES:
        return f"{OUTER_NAMES[module]}.{leaf}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{leaf}"


def pairs_together(weight: Any, heads: int) -> Any:
    """Reorder rows: llama.cpp rotates neighbouring elements of a head, Transformers those half a head apart."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


if __name__ == "__main__":
    main()
