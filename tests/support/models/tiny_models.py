"""Tiny random models of every family, saved like checkpoints, with a tokenizer whose words are token ids."""

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.models.tiny_configs import CONFIGS

VOCAB_SIZE = 101
EOS_ID = 100


def save_tiny_model(directory: Path, name: str, **changes: Any) -> Path:
    """Write config, float32 weights and tokenizer of the model that `CONFIGS[name]`, with `changes`, describes."""
    model = make_tiny_model(name, **changes)
    model.save_pretrained(directory)
    save_word_tokenizer(directory)
    return directory


@dataclass(frozen=True)
class SavedModel:
    """A model and the directory of its checkpoint."""

    directory: Path
    model: PreTrainedModel


class SavedModels:
    """The models of `CONFIGS`, each built and saved once, on first use. Tests must not change them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._saved: dict[str, SavedModel] = {}

    def __getitem__(self, name: str) -> SavedModel:
        if name not in self._saved:
            directory, model = self._root / name, make_tiny_model(name)
            model.save_pretrained(directory)
            save_word_tokenizer(directory)
            self._saved[name] = SavedModel(directory, model)
        return self._saved[name]


def one_group_each(names: Iterable[str], slow: Iterable[str] = ()) -> list[Any]:
    """Parameters whose tests run in one process per model, so that each model is built in one process only.

    slow: names that only `make test-long` runs.
    """
    return [
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *([pytest.mark.slow] if name in slow else [])])
        for name in names
    ]


def make_tiny_model(name: str, **changes: Any) -> PreTrainedModel:
    """Build the model. All parameters are random, with biases and norms, so that a missing one changes the result."""
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


def unchanged_by_length(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or a copy of it with dynamic rope scaling, which changes a model with each longer request."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    return copy.deepcopy(model) if rope.get("rope_type") == "dynamic" else model


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


def confirmed(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, guess: list[int]) -> list[int]:
    """The result of `generate_alone`. guess: the probable result, which one forward confirms in less time."""
    if len(guess) == max_new_tokens and is_greedy(model, prompt, guess):
        return guess
    return generate_alone(model, prompt, max_new_tokens)


@torch.no_grad()
def is_greedy(model: PreTrainedModel, prompt: list[int], ids: list[int], cache: Any = None) -> bool:
    """Whether each id is the best one after those before it, in one forward of the model.

    cache: takes the keys and values of that forward. False if the forward depends on the number of ids: the steps of a
    generation then differ from one forward.
    """
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return False
    known = [*prompt, *ids[:-1]]
    inputs = {"input_ids": torch.tensor([known]), "past_key_values": cache, "use_cache": cache is not None}
    if model.config.is_encoder_decoder:
        inputs["input_ids"] = torch.tensor([prompt])
        inputs["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id, *ids[:-1]]])
    logits = model(**inputs).logits[0, -len(ids) :]
    return logits.argmax(-1).tolist() == ids


@torch.no_grad()
def generate_alone(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Ids of Transformers' own greedy generation for one prompt, end-of-sequence ignored."""
    output = unchanged_by_length(model).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids
