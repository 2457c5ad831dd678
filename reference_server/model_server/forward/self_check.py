"""Compares a forward over the cache with the model alone, on a few tokens before serving.

The forwards of the lower tiers run model code that was not reviewed. A model that handles padding, positions or its
cache in another way is found here and refused, instead of giving wrong answers.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.forward.inputs import Forward, build_inputs
from reference_server.model_server.memory.kv_cache import KVCache, LayerShape, blocks_for
from reference_server.model_server.models.loader import LoadedModel
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.step_state import StepState
from reference_server.tokenizer import Tokenizer

# Share of the logits' spread. Rounding errors are well below these; the error of a wrong mask or of another row's K/V
# is far above.
FLOAT32_LIMIT, HALF_LIMIT = 1e-3, 0.15

_PROMPT_LENGTHS = (3, 40, 1)
# Lengths of a second request in the batch of the first prompt: some models scale attention by the longest row of a
# batch, from a few thousand tokens on.
_SHIFTS = (64, 1024, 16384)
_NEW_TOKENS = 16
# Rows of each forward: two prompts, steps of theirs, one that joins, all three, and two in another order.
_STEPS = ((0, 1), (0, 1), (0, 1), (0, 1), (2,), (0, 1, 2), (2, 0))


@torch.no_grad()
def distance_from_alone(
    forward: Forward,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    state: StepState,
    shapes: tuple[LayerShape, ...],
    block_size: int,
) -> float:
    """The largest distance between the logits of rows that join and leave and those of each row alone."""
    with_encoder = bool(loaded.config.is_encoder_decoder)
    sequences = [
        _sequence(number, length, loaded, tokenizer, block_size, with_encoder)
        for number, length in enumerate(_PROMPT_LENGTHS)
    ]
    num_blocks = 2 + max(int(sequence.blocks.max()) for sequence in sequences)
    shifts = _shifts(loaded.config) if shapes else ()
    long_rows = [_long(sequences[-1], length, num_blocks - 1, block_size) for length in shifts]
    state.cache = KVCache(shapes, num_blocks, block_size, loaded.dtype, loaded.device)
    worst = 0.0
    try:
        steps = [tuple(sequences[member] for member in members) for members in _STEPS]
        steps += [(sequences[0], long_row) for long_row in long_rows]
        for rows in steps:
            batch = SequenceBatch(0, rows, block_size)
            logits = forward(build_inputs(batch, prompt_logprobs=False))
            for sequence, row in zip(batch.sequences, logits, strict=True):
                if sequence in long_rows:
                    continue
                distance = _distance(row, _alone(loaded.model, sequence))
                worst = max(worst, math.inf if math.isnan(distance) else distance)
                sequence.cache_len += sequence.input_len
                sequence.input_len = 1
                sequence.ids.append(_token(loaded, len(sequence.ids)))
    finally:
        state.cache = None
    return worst


def limit_of(dtype: torch.dtype) -> float:
    """The largest distance that rounding causes."""
    return FLOAT32_LIMIT if dtype == torch.float32 else HALF_LIMIT


def _alone(model: Any, sequence: Sequence) -> Tensor:
    """[vocab_size]: the next token's logits from the model's own forward, without a cache."""
    ids = torch.tensor([sequence.ids], device=model.device)
    if sequence.encoder_ids:
        prompt = torch.tensor([sequence.encoder_ids], device=model.device)
        output = model(input_ids=prompt, decoder_input_ids=ids, use_cache=False)
    else:
        output = model(input_ids=ids, use_cache=False)
    logits: Tensor = output.logits[0, -1]
    return logits


def _distance(found: Tensor, expected: Tensor) -> float:
    spread = (expected.float() - expected.float().mean()).norm()
    return float((found.float() - expected.float()).norm() / spread)


def _sequence(
    number: int, length: int, loaded: LoadedModel, tokenizer: Tokenizer, block_size: int, with_encoder: bool
) -> Sequence:
    ids = [_token(loaded, 7 * number + place) for place in range(length)]
    stopping = StoppingParameters(max_new_tokens=_NEW_TOKENS)
    decoder_ids = ids[:1] if with_encoder else ids
    needed = blocks_for(length + stopping.max_new_tokens, block_size)
    first_block = 1 + number * blocks_for(max(_PROMPT_LENGTHS) + stopping.max_new_tokens, block_size)
    return Sequence(
        request=Request(number, (), length, ChooserParameters(), stopping),
        ids=decoder_ids,
        prompt_len=len(decoder_ids),
        cache_len=0,
        input_len=len(decoder_ids),
        blocks=np.arange(first_block, first_block + needed, dtype=np.int64),
        stopping=StoppingCriteria(stopping, frozenset()),
        detokenizer=IncrementalDetokenizer(tokenizer, decoder_ids),
        encoder_ids=ids if with_encoder else [],
    )


def _shifts(config: Any) -> Iterator[int]:
    """The lengths of `_SHIFTS`, within the model's positions; none if an encoder-decoder's are unknown."""
    names = [name for name in vars(config) if name.endswith(("position_embeddings", "n_positions", "max_seq_len"))]
    limits = [limit for name in names if isinstance(limit := getattr(config, name), int)]
    if config.is_encoder_decoder and not limits:
        return
    yield from sorted({min(length, *limits, _SHIFTS[-1]) - 1 for length in _SHIFTS})


def _long(sequence: Sequence, length: int, block: int, block_size: int) -> Sequence:
    """A sequence with `length` tokens in the cache, all of them in one block; its own result is not used."""
    stopping = StoppingParameters(max_new_tokens=length + 2)
    decoder_len = length + 1
    return replace(
        sequence,
        request=replace(sequence.request, stopping=stopping),
        ids=[sequence.ids[0]] * decoder_len,
        prompt_len=1,
        cache_len=length,
        input_len=1,
        blocks=np.full(blocks_for(decoder_len + len(sequence.encoder_ids) + 1, block_size), block, dtype=np.int64),
    )


def _token(loaded: LoadedModel, number: int) -> int:
    """An id that is not special to the model."""
    special = {getattr(loaded.config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos", "decoder_start")}
    vocab_size: int = loaded.config.vocab_size
    return next(id_ for step in range(vocab_size) if (id_ := (13 + 29 * number + step) % vocab_size) not in special)
