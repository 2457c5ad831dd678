"""Tiny random models of every family, saved as a user would have them, with a tokenizer whose words are token ids."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 101
EOS_ID = 100

_ROTARY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2, **_ROTARY},
    "llama-tied-llama3-rope": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": _LLAMA3_ROPE,
        **_ROTARY,
    },
    "mistral-window": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 6, **_ROTARY},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 1, **_ROTARY},
    "qwen2-sharded": {"model_type": "qwen2", "num_key_value_heads": 2, **_ROTARY},
    "gpt2": {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4},
    "gpt-neox": {"model_type": "gpt_neox", **_ROTARY, "rotary_pct": 0.5},
    "gpt-neox-serial": {"model_type": "gpt_neox", **_ROTARY, "use_parallel_residual": False},
    "bloom": {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 4},
    "bloom-6-heads": {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 6},
}


def save_tiny_model(directory: Path, name: str, **changes: Any) -> Path:
    """Write config, float32 weights and tokenizer of the model that `CONFIGS[name]`, with `changes`, describes."""
    model = make_tiny_model(name, **changes)
    model.save_pretrained(directory)
    save_word_tokenizer(directory)
    return directory


def make_tiny_model(name: str, **changes: Any) -> PreTrainedModel:
    """The model itself. Every parameter is random, biases and norms included, so that none can be left out unseen."""
    settings = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 256, **CONFIGS[name], **changes}
    settings |= {"bos_token_id": 0, "eos_token_id": EOS_ID, "pad_token_id": None}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 and (parameter == 1).all() else 0.15 * noise)
    return model.eval()


def save_word_tokenizer(directory: Path) -> None:
    """`w7 w3` is the ids 7, 3; id EOS_ID is the special token `</s>`."""
    vocab = {f"w{id_}": id_ for id_ in range(VOCAB_SIZE - 1)} | {"</s>": EOS_ID}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "</s>", "model_max_length": 256}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def text_of(ids: list[int]) -> str:
    return " ".join(f"w{id_}" for id_ in ids)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(0, VOCAB_SIZE - 1, (length,), generator=generator).tolist()
    return ids


@torch.no_grad()
def generate_alone(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What Transformers' own greedy generation gives for one prompt, end-of-sequence ignored."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids
