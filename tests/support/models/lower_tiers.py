"""Tiny models of the padded, encoder-decoder and recurrent tiers, and their expected ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from reference_server.messages import Request
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import Tier
from tests.support.models.shard_driver import ShardDriver, outside_loop
from tests.support.models.tiny_models import EOS_ID, VOCAB_SIZE, is_greedy, random_prompt, save_word_tokenizer
from tests.support.models.tiny_shards import tiny_options, warm_up

PROMPTS = [random_prompt(length) for length in (4, 20, 2, 11)]
NEW_TOKENS = 10

_DECODER = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
_T5 = {"d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
_BART = {
    "d_model": 48,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 80 for side in ("encoder", "decoder")},
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
    "forced_eos_token_id": None,
}
_GPT_NEO = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "intermediate_size": 80, "window_size": 6}
_LED = {"attention_window": [4, 4], "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}

PADDED: dict[str, dict[str, Any]] = {
    "gpt-neo": {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 1]], **_GPT_NEO},
    "codegen": {"model_type": "codegen", "n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_inner": 80},
    "biogpt, by no record": {"model_type": "biogpt", **_DECODER},
    "ctrl, by no record": {"model_type": "ctrl", "n_embd": 48, "dff": 80, "n_layer": 2, "n_head": 4},
}
ENCODER_DECODER: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5", "pad_token_id": 0, **_T5},
    "mt5": {"model_type": "mt5", "pad_token_id": 0, **_T5},
    "t5-gated-tied": {
        "model_type": "t5",
        "pad_token_id": 0,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": True,
        **_T5,
    },
    "bart": {"model_type": "bart", **_BART},
    # Its checkpoints lack the sinusoids of its positions (hardening R24).
    "marian, by no record": {"model_type": "marian", **_BART},
    "led, by no record": {"model_type": "led", **_BART, **_LED},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 12,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "falcon-mamba": {"model_type": "falcon_mamba", "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8},
}


def save_model(directory: Path, settings: dict[str, Any], seed: int = 11) -> PreTrainedModel:
    """Write a model with random parameters, and a tokenizer; returns the model as Transformers loads it."""
    settings = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 256, **settings}
    config = AutoConfig.for_model(**settings, bos_token_id=0, eos_token_id=EOS_ID)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto_class.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 and (parameter == 1).all() else 0.15 * noise)
    model.save_pretrained(directory)
    save_word_tokenizer(directory)
    loaded: PreTrainedModel = auto_class.from_pretrained(directory, dtype=torch.float32)
    return loaded.eval()


@torch.no_grad()
def generate_alone(model: PreTrainedModel, prompt: list[int], max_new_tokens: int = NEW_TOKENS) -> list[int]:
    """Ids of Transformers' own greedy generation for one prompt, end-of-sequence ignored."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids: list[int] = output[0].tolist()
    return ids[1:] if model.config.is_encoder_decoder else ids[len(prompt) :]


@dataclass(frozen=True)
class Loaded:
    """A shard, its model as Transformers loads it, and the ids that the model generates alone."""

    shard: LocalShard
    model: PreTrainedModel
    expected: list[list[int]]


def confirmed(model: PreTrainedModel, prompt: list[int], guess: list[int]) -> list[int]:
    """The result of `generate_alone`. guess: the probable result, which one forward confirms in less time."""
    if len(guess) == NEW_TOKENS and is_greedy(model, prompt, guess):
        return guess
    return generate_alone(model, prompt)


@contextmanager
def serve_model(directory: Path, model: PreTrainedModel, tier: Tier | None = None) -> Iterator[Loaded]:
    """The saved model in a shard, in its own tier or in `tier`."""
    shard = LocalShard.load(tiny_options(directory, tier=tier))
    outside_loop(warm_up(shard))
    guesses = outside_loop(run_together(shard))
    yield Loaded(shard, model, [confirmed(model, *each) for each in zip(PROMPTS, guesses, strict=True)])
    shard.close()


def unplaced(
    driver: ShardDriver, id_: int, prompt: list[int], max_new_tokens: int = NEW_TOKENS, **more: Any
) -> Request:
    """A request as a router sends it to a padded model: without blocks."""
    placed = driver.request(id_, prompt, max_new_tokens, **more)
    driver.sent[id_] = placed
    driver.release(id_)
    return replace(placed, blocks=(), num_slots=0)


async def run_together(shard: LocalShard) -> list[list[int]]:
    """Generate for all prompts in one batch."""
    driver = ShardDriver(shard)
    outcomes = await driver.run(*(unplaced(driver, id_, prompt) for id_, prompt in enumerate(PROMPTS)))
    return [outcome.ids for outcome in outcomes]


async def join_and_leave(shard: LocalShard) -> list[list[int]]:
    """Prompts join a running batch twice, one ends after four tokens, and the others are reordered."""
    driver = ShardDriver(shard)
    first = await driver.prefill(unplaced(driver, 0, PROMPTS[0]), unplaced(driver, 1, PROMPTS[1], 4))
    first = await driver.decode(first.batch)
    second = await driver.prefill(unplaced(driver, 2, PROMPTS[2]))
    merged = await driver.decode(first.batch, second.batch)
    merged = await driver.decode(merged.batch)
    assert merged.batch is not None
    kept = await shard.filter_batch(merged.batch.id, [2, 0])
    third = await driver.prefill(unplaced(driver, 3, PROMPTS[3]))
    await driver.finish(await driver.decode(kept, third.batch))
    return [driver.outcomes[id_].ids for id_ in range(4)]


def as_joined(expected: list[list[int]]) -> list[list[int]]:
    """The result of `join_and_leave`, given the ids that each prompt gives alone."""
    return [ids[:4] if id_ == 1 else ids for id_, ids in enumerate(expected)]
