"""Turns requests into sequences: tokens, limits, K/V blocks, grammar state."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from reference_server.errors import ShardError
from reference_server.images.chunks import uncut
from reference_server.messages import Batch, Grammar, GrammarType, Request
from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.grammar import Grammars, GrammarState
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.expanded_prompt import ExpandedPrompt
from reference_server.model_server.forward.prepare import PreparedModel
from reference_server.model_server.memory.kv_cache import blocks_for
from reference_server.model_server.models.vision import VisionTower
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.step_state import StepState
from reference_server.tokenizer import Tokenizer

MAX_BLOCKS = 1 << 23
"""Blocks of a request before the cache has a size; 2^27 tokens in blocks of 16."""


@dataclass(frozen=True, slots=True)
class Intake:
    """Makes the sequences of one model.

    vocab_size: rows of its embedding. max_positions: rows of its position table; None if it has no such table. vision:
    computes the embeddings of images; None for a model that takes text only.
    """

    model: PreparedModel
    state: StepState
    tokenizer: Tokenizer
    grammars: Grammars
    eos_ids: frozenset[int]
    supports_chunking: bool
    vocab_size: int
    max_positions: int | None
    vision: VisionTower | None = None

    def make_batch(self, batch: Batch, running: Iterable[Sequence] = ()) -> SequenceBatch:
        """Tokenize requests into sequences; raises ShardError for one that cannot be run.

        running: the sequences whose blocks are in use, for requests without blocks.
        """
        if not batch.requests:
            raise ShardError("Batch must have at least one request")
        sequences = tuple(self._make_sequence(request) for request in batch.requests)
        if any(not request.blocks for request in batch.requests):
            self._assign_blocks(sequences, running)
        return SequenceBatch(batch.id, sequences, self.model.choice.block_size)

    def _make_sequence(self, request: Request) -> Sequence:
        self._check_numbers(request)
        prompt = ExpandedPrompt.of(request, self.vision)
        all_ids = self.tokenizer.encode(prompt.text, request.add_special_tokens)
        # `truncate` keeps the last tokens.
        ids = all_ids[-request.truncate :]
        prompt_len = len(ids)
        remaining = prompt_len - request.cache_len
        if remaining <= 0:
            raise ShardError(
                f"request {request.id}: {request.cache_len} cached tokens leave none of {prompt_len} to compute"
            )
        self._check_ids(request.id, ids)
        self._check_chunk(request, remaining)
        self._check_positions(request.id, prompt_len, request.stopping.max_new_tokens)
        needed = self._blocks_needed(request, prompt_len)
        spans = prompt.uncut_spans_of(all_ids, prompt_len)
        chunk_len = uncut(request.cache_len, request.chunk_len or remaining, spans)
        start_id = self.model.start_id
        decoder_ids = ids if start_id is None else [start_id]
        return Sequence(
            request=request,
            ids=decoder_ids,
            prompt_len=len(decoder_ids),
            cache_len=request.cache_len,
            input_len=1 if start_id is not None else chunk_len,
            blocks=np.array(request.blocks or range(needed), dtype=np.int64),
            stopping=StoppingCriteria(request.stopping, self.eos_ids),
            detokenizer=IncrementalDetokenizer(self.tokenizer, decoder_ids),
            encoder_ids=[] if start_id is None else ids,
            grammar=self._grammar_state(request),
            adapter=0 if self.model.adapters is None else self.model.adapters.find(request.adapter_id),
            images=prompt.images_of(all_ids, prompt_len),
            grid=prompt.grid_of(all_ids, prompt_len),
            bidirectional=prompt.spans_of(all_ids, prompt_len),
            uncut_spans=spans,
        )

    def _check_numbers(self, request: Request) -> None:
        """Raise ShardError for numbers that would size a list or name a block that the cache lacks."""
        cache = self.state.cache
        # Without a cache, during the warm-up, the request's own numbers size it.
        num_blocks = MAX_BLOCKS if cache is None else cache.num_blocks
        limit = num_blocks * self.model.choice.block_size
        if request.stopping.max_new_tokens > limit:
            raise ShardError(
                f"request {request.id}: `max_new_tokens` is {request.stopping.max_new_tokens}, but the K/V cache holds "
                f"{limit} tokens: lower `--max-batch-total-tokens`"
            )
        if request.blocks and max(request.blocks) >= num_blocks:
            raise ShardError(f"request {request.id} has block {max(request.blocks)}, but there are {num_blocks} blocks")

    def _check_ids(self, request_id: int, ids: list[int]) -> None:
        if (largest := max(ids)) >= self.vocab_size:
            raise ShardError(
                f"request {request_id} has the token id {largest}, but the model's vocabulary has {self.vocab_size} ids"
            )

    def _check_chunk(self, request: Request, remaining: int) -> None:
        if request.chunk_len is None:
            return
        if not self.supports_chunking:
            raise ShardError(f"request {request.id} asks for a chunk, but prompts are not computed in chunks here")
        if not 0 < request.chunk_len <= remaining:
            raise ShardError(
                f"request {request.id}: a chunk of {request.chunk_len} tokens does not fit the {remaining} that "
                "remain; router and model server tokenize differently"
            )

    def _check_positions(self, request_id: int, prompt_len: int, max_new_tokens: int) -> None:
        """Raise ShardError for a request past the end of a position table: the lookup would end the process."""
        if self.max_positions is None:
            return
        is_decoder_only = self.model.start_id is None
        needed = prompt_len + max_new_tokens - 1 if is_decoder_only else max(prompt_len, max_new_tokens)
        if needed > self.max_positions:
            raise ShardError(
                f"request {request_id} needs {needed} positions and the model has {self.max_positions}: lower "
                "`--max-input-tokens` and `--max-total-tokens`"
            )

    def _blocks_needed(self, request: Request, prompt_len: int) -> int:
        tokens = self.model.tokens_kept(prompt_len, request.stopping.max_new_tokens)
        needed = blocks_for(tokens, self.model.choice.block_size)
        if request.blocks and len(request.blocks) < needed:
            raise ShardError(
                f"request {request.id} needs {needed} blocks and has {len(request.blocks)}; router and model server "
                "tokenize differently"
            )
        return needed

    def _grammar_state(self, request: Request) -> GrammarState | None:
        parameters = request.parameters
        if parameters.grammar_type is GrammarType.NONE or not parameters.grammar:
            return None
        prefix = request.text[-parameters.grammar_prefix_chars :] if parameters.grammar_prefix_chars else ""
        return self.grammars.state(Grammar(parameters.grammar, parameters.grammar_type), prefix)

    def _assign_blocks(self, sequences: tuple[Sequence, ...], running: Iterable[Sequence]) -> None:
        """Give blocks to requests without any: in the warm-up, before the cache exists, and under schema v2.

        A block is free if no sequence holds it. Blocks need no explicit release, and all ranks choose the same blocks.
        """
        with_blocks = [sequence for sequence in sequences if sequence.request.blocks]
        in_use = {block for sequence in (*running, *with_blocks) for block in sequence.blocks.tolist()}
        cache = self.state.cache
        # Block 0 is reserved for the liveness probe.
        candidates = itertools.count() if cache is None else range(1, cache.num_blocks)
        free = (block for block in candidates if block not in in_use)
        for sequence in sequences:
            if sequence.request.blocks:
                continue
            blocks = list(itertools.islice(free, len(sequence.blocks)))
            if len(blocks) < len(sequence.blocks):
                raise ShardError(
                    f"request {sequence.request.id} needs {len(sequence.blocks)} blocks, {len(blocks)} are free: "
                    "lower `--max-batch-total-tokens`"
                )
            sequence.blocks = np.array(blocks, dtype=np.int64)
