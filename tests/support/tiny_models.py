"""Tiny random models of every family, saved as a user would have them, with a tokenizer whose words are token ids."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_configs import CONFIGS

VOCAB_SIZE = 101
EOS_ID = 100


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
    # SDPA leaves Gemma 2's softcap out (Transformers 5.17); Falcon's eager attention adds the ALiBi bias twice.
    attention = "sdpa" if settings.get("alibi") else "eager"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**settings), dtype=torch.float32, attn_implementation=attention
    )
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
