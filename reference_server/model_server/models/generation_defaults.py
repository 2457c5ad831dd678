"""Generation settings in a model's files that requests do not inherit: a warning names those that change the text."""

from collections.abc import Mapping
from typing import Any

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "num_beams": (1,),
}
"""Settings that are not applied, with the values that have no effect; null has none in all of them."""


def ignored(*files: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `NEUTRAL` in generation_config.json or config.json that have an effect; the first file counts."""
    found = {name: next((file[name] for file in files if name in file), None) for name in NEUTRAL}
    return {name: value for name, value in found.items() if value is not None and value not in NEUTRAL[name]}
