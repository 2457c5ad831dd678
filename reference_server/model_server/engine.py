"""One rank's model made ready to serve: what `LocalShard` steps, without the calls of the protocol.

Load, probe, choose kernels, fuse; turn requests into sequences; size the K/V cache.
"""

import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import torch

from reference_server.errors import ArgumentError, ShardError
from reference_server.messages import (
    Batch,
    GrammarType,
    Image,
    ModelInfo,
    Request,
    WarmupReply,
    WarmupRequest,
)
from reference_server.model_server.attention.state import AttentionState
from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.grammar import Grammars, GrammarState
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.decoding.watermark import Watermark
from reference_server.model_server.device import (
    DeviceMemory,
    choose_device,
    first_line,
    is_out_of_memory,
    make_current,
    prepare,
    release_unused,
)
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.forward import tiers
from reference_server.model_server.forward.cuda_graph import graph_sizes
from reference_server.model_server.generate import ChoosingOptions, Generator, StepOutput
from reference_server.model_server.kv_cache import KVCache, blocks_for, bytes_per_block
from reference_server.model_server.models import loader
from reference_server.model_server.models.families import max_positions
from reference_server.model_server.models.loader import LoadedModel
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.run_ahead import RunAhead
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.warmup import (
    GIB,
    blocks_in_free_memory,
    blocks_that_fit,
    device_bytes,
    peak_bytes_of,
)
from reference_server.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_BLOCKS_WITHOUT_KEYS = 1 << 20
"""A recurrent model's requests are given block numbers like all others; nothing is kept in them."""


class Engine:
    """A loaded model, its tokenizer and its cache."""

    def __init__(
        self,
        options: EngineOptions,
        group: RankGroup,
        loaded: LoadedModel,
        tokenizer: Tokenizer,
        tokenizer_max_len: int | None,
    ) -> None:
        self._options = options
        self._group = group
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._tokenizer_max_len = tokenizer_max_len
        self._state = AttentionState()
        # A fused forward takes the weights over: the modules no longer have them.
        weight_bytes = loaded.weight_bytes
        self._model = tiers.prepare(loaded, options, tokenizer, self._state)
        self._block_size = self._model.choice.block_size
        self._weight_bytes = weight_bytes + self._model.added_bytes
        watermark = Watermark(options.watermark_gamma, options.watermark_delta)
        # A model that pads computes all logits of its prompts anyway.
        prompt_logprobs = options.request_logprobs or self._model.requires_padding
        choosing = ChoosingOptions(loaded.eos_ids, watermark, prompt_logprobs)
        self._grammars = Grammars(tokenizer, loaded.eos_ids)
        self._grammars.prepare()
        self._generator = Generator(self._model.forward, tokenizer, group, choosing)
        # A device that computes by itself is kept busy; a CPU answers first. A recurrent state cannot be stepped back.
        may_run_ahead = options.run_ahead and not self._model.requires_padding
        self.run_ahead = RunAhead(self._generator, may_run_ahead, launches_first=loaded.device.type != "cpu")
        self.info = ModelInfo(
            requires_padding=self._model.requires_padding,
            dtype=str(loaded.dtype),
            device_type=loaded.device.type,
            support_chunking=(
                options.prefill_chunking and self._model.choice.supports_chunking and not self._model.requires_padding
            ),
            use_prefix_caching=options.prefix_caching and not self._model.requires_padding,
            attention_impl=self._model.choice.impl,
            block_size=self._block_size,
        )
        self.backends = self._model.backends

    @classmethod
    def load(cls, options: EngineOptions, rank: int, world_size: int) -> "Engine":
        """Read the model's files; raises StartupError for what is not served."""
        torch.set_num_threads(options.compute_threads or default_compute_threads())
        device = choose_device(rank)
        make_current(device)
        prepare(device, options.memory_fraction)
        group = RankGroup(rank, world_size)
        files = loader.locate(options)
        _refuse_too_large(options, loader.expected_weight_bytes(options, files), world_size, device)
        group.barrier()
        loaded = loader.load(options, files, group)
        group.barrier()
        tokenizer = load_tokenizer(
            files.tokenizer_directory,
            loaded.config.vocab_size,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
        engine = cls(options, group, loaded, tokenizer, _tokenizer_max_len(files.tokenizer_directory))
        logger.info(
            "loaded %s (%s, %s, %.2f GiB of weights); attention and kernels: %s",
            *(options.model_id, loaded.family.name, engine.info.dtype, engine._weight_bytes / GIB, engine.backends),
        )
        return engine

    def enter_thread(self) -> None:
        """Make the device current in the calling thread, which is going to step."""
        make_current(self._loaded.device)

    def check_device(self) -> None:
        """Touch the device and wait for it; raises RuntimeError if it is gone."""
        torch.zeros((2, 2), device=self._loaded.device).tolist()

    def release_memory(self) -> None:
        """Give the device back what no tensor holds; between steps only, as allocating anew takes long."""
        release_unused(self._loaded.device)

    def step(self, batch: SequenceBatch) -> StepOutput:
        """The next token of every live sequence, and what follows from it."""
        with self._no_gradients():
            output = self.run_ahead.step(batch)
            for sequence in output.dropped:
                self._cleanse(sequence)
        return output

    def launch(self, batch: SequenceBatch) -> SequenceBatch:
        """The batch with its next step computed, where it may run ahead; an error waits for the call it belongs to."""
        with self._no_gradients():
            return self.run_ahead.launch(batch)

    def forget(self, batch: SequenceBatch, gone: Iterable[Sequence]) -> None:
        """Some of a batch's sequences are asked for no more: leave nothing of a step gone wrong in their blocks."""
        if batch.pending:
            with self._no_gradients():
                for sequence in self.run_ahead.failed(batch, set(gone)):
                    self._cleanse(sequence)

    def _no_gradients(self) -> AbstractContextManager[object]:
        # Inference mode breaks gloo's collectives, so several ranks only do without gradients.
        return torch.inference_mode() if self._group.world_size == 1 else torch.no_grad()

    def make_batch(self, batch: Batch, running: Iterable[Sequence] = ()) -> SequenceBatch:
        """Tokenize requests into sequences; raises ShardError for one that cannot be run.

        `running` are the sequences whose blocks are taken, should a request bring none of its own.
        """
        if not batch.requests:
            raise ShardError("Batch must have at least one request")
        sequences = tuple(self._make_sequence(request) for request in batch.requests)
        if any(not request.blocks for request in batch.requests):
            self._assign_blocks(sequences, running)
        return SequenceBatch(batch.id, sequences, self._block_size)

    def _make_sequence(self, request: Request) -> Sequence:
        if any(isinstance(chunk, Image) for chunk in request.chunks) and not request.text:
            raise ShardError("this model takes text only")
        # The last `truncate` tokens count.
        ids = self._tokenizer.encode(request.text, request.add_special_tokens)[-request.truncate :]
        prompt_len = len(ids)
        remaining = prompt_len - request.cache_len
        if remaining <= 0:
            raise ShardError(
                f"request {request.id}: {request.cache_len} cached tokens leave none of {prompt_len} to compute"
            )
        input_len = remaining
        if request.chunk_len is not None:
            if not self.info.support_chunking:
                raise ShardError(f"request {request.id} asks for a chunk, but prompts are not computed in chunks here")
            if not 0 < request.chunk_len <= remaining:
                raise ShardError(
                    f"request {request.id}: a chunk of {request.chunk_len} tokens does not fit the {remaining} that "
                    "remain; router and model server tokenize differently"
                )
            input_len = request.chunk_len
        self._check_positions(request.id, prompt_len, request.stopping.max_new_tokens)
        needed = blocks_for(self._model.tokens_kept(prompt_len, request.stopping.max_new_tokens), self._block_size)
        if request.blocks and len(request.blocks) < needed:
            raise ShardError(
                f"request {request.id} needs {needed} blocks and has {len(request.blocks)}; router and model server "
                "tokenize differently"
            )
        start_id = self._model.start_id
        decoder_ids = ids if start_id is None else [start_id]
        return Sequence(
            request=request,
            ids=decoder_ids,
            prompt_len=len(decoder_ids),
            cache_len=request.cache_len,
            input_len=input_len if start_id is None else 1,
            blocks=np.array(request.blocks or range(needed), dtype=np.int64),
            stopping=StoppingCriteria(request.stopping, self._loaded.eos_ids),
            detokenizer=IncrementalDetokenizer(self._tokenizer, decoder_ids),
            encoder_ids=[] if start_id is None else ids,
            grammar=self._grammar_state(request),
        )

    def _grammar_state(self, request: Request) -> GrammarState | None:
        parameters = request.parameters
        if parameters.grammar_type is GrammarType.NONE or not parameters.grammar:
            return None
        # A schema that has come this far could not be compiled.
        if parameters.grammar_type is not GrammarType.REGEX:
            return self._grammars.failed_state()
        passed = request.text[-parameters.grammar_prefix_chars :] if parameters.grammar_prefix_chars else ""
        return self._grammars.state(parameters.grammar, passed)

    def _check_positions(self, request_id: int, prompt_len: int, max_new_tokens: int) -> None:
        """Raise ShardError for a request past the end of a table: the lookup would end the process."""
        positions = max_positions(self._loaded.config)
        if positions is None or not self._loaded.family.has_position_table:
            return
        decoder_only = self._model.start_id is None
        needed = prompt_len + max_new_tokens - 1 if decoder_only else max(prompt_len, max_new_tokens)
        if needed > positions:
            raise ShardError(
                f"request {request_id} needs {needed} positions and the model has {positions}: lower "
                "`--max-input-tokens` and `--max-total-tokens`"
            )

    def _assign_blocks(self, sequences: tuple[Sequence, ...], running: Iterable[Sequence]) -> None:
        """Place what the router leaves to the shard: warm-up, before there is a cache, and every prompt of schema v2.

        What is free is what no sequence holds, so nothing has to be given back, and all ranks find the same blocks.
        """
        placed = [sequence for sequence in sequences if sequence.request.blocks]
        taken = {block for sequence in (*running, *placed) for block in sequence.blocks.tolist()}
        cache = self._state.cache
        # Block 0 belongs to the liveness probe.
        candidates = itertools.count() if cache is None else range(1, cache.num_blocks)
        free = (block for block in candidates if block not in taken)
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

    def _cleanse(self, sequence: Sequence) -> None:
        """Take what is not finite out of a failed sequence's blocks: their next owner's kernel reads whole pages."""
        assert self._state.cache is not None
        blocks = torch.from_numpy(sequence.blocks).to(self._loaded.device)
        for layer in self._state.cache.layers:
            layer[blocks] = torch.nan_to_num(layer[blocks], nan=0.0, posinf=0.0, neginf=0.0)

    def warmup(self, request: WarmupRequest) -> WarmupReply:
        """Run the largest prefill, then allocate the blocks that fit beside it (model-server.md section 5.1)."""
        block_size = self._block_size
        self._generator.max_prefill_tokens = blocks_for(request.max_prefill_tokens, block_size) * block_size
        if self._model.graphs is not None:
            self._model.graphs.release()
        self._state.cache = None
        batch = self.make_batch(request.batch)
        prompt_tokens = sum(len(sequence.encoder_ids or sequence.ids) for sequence in batch.sequences)
        warmup_blocks = sum(len(sequence.blocks) for sequence in batch.sequences)
        too_much = (
            f"Not enough memory to handle {prompt_tokens} prefill tokens. You need to decrease "
            "`--max-batch-prefill-tokens`"
        )
        with _told_when_memory_ends(too_much):
            self._allocate(warmup_blocks)
            with torch.no_grad(), peak_bytes_of(self._loaded.device) as tensors:
                self.run_ahead.step(batch)
        num_blocks = self._group.minimum(self._blocks_that_fit(tensors.peak, warmup_blocks))
        no_cache = f"Not enough memory for {num_blocks} K/V blocks. You need to decrease `--cuda-memory-fraction`"
        with _told_when_memory_ends(no_cache):
            self._allocate(num_blocks)
        capacity = num_blocks * block_size
        max_total = request.max_total_tokens or self._default_max_total(capacity, prompt_tokens)
        logger.info("K/V cache: %d blocks of %d tokens", num_blocks, block_size)
        if self._model.requires_padding:
            self._check_capacity(capacity, max_total)
        self._capture(num_blocks, max_total)
        return WarmupReply(
            # The router budgets a padded model by rows and longest prompt, as the operator set it.
            max_supported_total_tokens=None if self._model.requires_padding else capacity,
            max_input_tokens=request.max_input_tokens or max_total - 1,
            max_total_tokens=max_total,
            weight_bytes=self._weight_bytes,
            prefill_peak_bytes=tensors.peak,
            backends=self.backends,
        )

    def _capture(self, num_blocks: int, max_total: int) -> None:
        """Record the decode steps that are replayed from here on. Block 0 is nobody's, so rows have the others."""
        graphs = self._model.graphs
        if graphs is None:
            return
        sizes = graph_sizes(self._options.cuda_graphs, num_blocks - 1)
        started = time.perf_counter()
        with self._no_gradients():
            graphs.capture(sizes, max_total)
        self.release_memory()
        logger.info("captured %d CUDA graphs in %.1f s", len(graphs.sizes), time.perf_counter() - started)

    def _check_capacity(self, capacity: int, max_total: int) -> None:
        """What the router does for a model that reports its cache. It cannot know how much a padded one's holds."""
        if max_total > capacity:
            raise ShardError(
                f"not enough memory: `max_total_tokens` is {max_total}, but the key-value cache holds {capacity} "
                "tokens; lower `--max-total-tokens` or raise `--cpu-memory-gib` or `--cuda-memory-fraction`"
            )
        if self._model.shapes:
            logger.info("a batch finds room for %d tokens: keep `--max-batch-total-tokens` at most there", capacity)

    def _blocks_that_fit(self, peak_bytes: int, warmup_blocks: int) -> int:
        if not self._model.shapes:
            return _BLOCKS_WITHOUT_KEYS
        device = self._loaded.device
        block_bytes = bytes_per_block(self._model.shapes, self._block_size, self._loaded.dtype)
        if device.type != "cpu":
            share = self._options.memory_fraction * self._options.wiggle_room
            return blocks_in_free_memory(DeviceMemory.of(device), share, block_bytes) + warmup_blocks
        budget = device_bytes(self._options) * self._options.memory_fraction / self._group.world_size
        return blocks_that_fit(
            budget,
            self._weight_bytes,
            peak_bytes,
            block_bytes,
        )

    def _allocate(self, num_blocks: int) -> None:
        self._state.cache = None
        # A cache of another size would not fit the pieces that the allocator keeps.
        self.release_memory()
        self._state.cache = KVCache(
            self._model.shapes, num_blocks, self._block_size, self._loaded.dtype, self._loaded.device
        )

    def _default_max_total(self, capacity: int, prompt_tokens: int) -> int:
        if not self.info.support_chunking:
            return prompt_tokens
        positions = max_positions(self._loaded.config)
        return min(limit for limit in (capacity, positions, self._tokenizer_max_len) if limit)


def _refuse_too_large(options: EngineOptions, weight_bytes: int, world_size: int, device: torch.device) -> None:
    """Before minutes of loading and a machine without memory. `device` is this rank's: asking it takes some of it."""
    if device.type == "cpu":
        budget = device_bytes(options) * options.memory_fraction
    else:
        budget = DeviceMemory.of(device).total_bytes * options.memory_fraction * world_size
    if weight_bytes > budget:
        raise ArgumentError(
            f"the weights of {options.model_id} take {weight_bytes / GIB:.2f} GiB, but only {budget / GIB:.2f} GiB "
            f"may be used by {world_size} shard(s): raise `--cpu-memory-gib` or `--cuda-memory-fraction`"
        )


@contextmanager
def _told_when_memory_ends(sentence: str) -> Iterator[None]:
    """Raise RuntimeError of `sentence` and the allocator's own first line, which has the bytes."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(f"{sentence}: {first_line(error)}") from error


def default_compute_threads() -> int:
    """One core is left to the router and the client."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _tokenizer_max_len(directory: Path) -> int | None:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    length = json.loads(path.read_text()).get("model_max_length")
    return int(length) if length else None
