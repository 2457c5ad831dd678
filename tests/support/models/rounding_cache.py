"""Transformers' own generation with keys and values rounded to eight bits: the reference of an eight-bit K/V cache."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from tests.support.models.tiny_models import confirmed, is_greedy, unchanged_by_length

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class RoundingCache(DynamicCache):
    """Attention reads the rounded keys and values already in the step that computes them.

    scales: the factors of the stored keys and of the stored values.
    """

    def __init__(self, config: Any, dtype: torch.dtype, scales: tuple[float, float]) -> None:
        super().__init__(config=config)
        self._dtype = dtype
        self._scales = scales

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        pair = (self._kept(each, scale) for each, scale in zip((key_states, value_states), self._scales, strict=True))
        return super().update(*pair, *args, **kwargs)  # type: ignore[no-any-return]

    def _kept(self, values: Tensor, scale: float) -> Tensor:
        return rounded(values, self._dtype, scale)


def rounded(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    largest = LARGEST[dtype]
    return (values / scale).clamp(-largest, largest).to(dtype).to(values.dtype) * scale


def with_rounded_latents(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel | None:
    """A copy of a model with latents in its cache that rounds the expanded keys and values; None for other models."""
    if not any(hasattr(module, "expand_kv") for module in model.modules()):
        return None
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            module.expand_kv = partial(_expanded, module.expand_kv, dtype)  # type: ignore[assignment]
    return model


def _expanded(expand: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, *latents: Tensor) -> list[Tensor]:
    return [rounded(each, dtype, 1.0) for each in expand(*latents)]


@torch.no_grad()
def generate_rounded(
    model: PreTrainedModel,
    prompt: list[int],
    max_new_tokens: int,
    dtype: torch.dtype,
    scales: tuple[float, float] = (1.0, 1.0),
    guess: list[int] | None = None,
) -> list[int]:
    """Ids of Transformers' greedy generation for one prompt, end-of-sequence ignored.

    guess: the probable result, which one forward confirms in less time.
    """
    latent = with_rounded_latents(model, dtype)
    if latent is not None:
        return confirmed(latent, prompt, max_new_tokens, guess or [])
    if guess and len(guess) == max_new_tokens and is_greedy(model, prompt, guess, cache_of(model, dtype, scales)):
        return guess
    if model.config.model_type == "mpt":
        # Transformers' generation of MPT with a cache that is given to it is wrong, also with a plain one.
        return recomputed(model, prompt, max_new_tokens, dtype, scales)
    output = unchanged_by_length(model).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        past_key_values=cache_of(model, dtype, scales),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids: list[int] = output[0].tolist()
    return ids[1:] if model.config.is_encoder_decoder else ids[len(prompt) :]


def cache_of(model: PreTrainedModel, dtype: torch.dtype, scales: tuple[float, float]) -> Any:
    decoder = model.config.get_text_config(decoder=True)
    caches = [RoundingCache(decoder, dtype, scales) for _ in range(1 + model.config.is_encoder_decoder)]
    return EncoderDecoderCache(*caches) if model.config.is_encoder_decoder else caches[0]


@torch.no_grad()
def recomputed(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, dtype: torch.dtype, scales: tuple[float, float]
) -> list[int]:
    """The same with every step as a prompt of its own."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        cache = RoundingCache(model.config, dtype, scales)
        ids.append(int(model(torch.tensor([ids]), past_key_values=cache).logits[0, -1].argmax()))
    return ids[len(prompt) :]
