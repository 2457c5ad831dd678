"""One rank's model made ready to serve: load, prepare, size the K/V cache. `stepper` runs it, `intake` feeds it."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from reference_server.errors import ArgumentError, ShardError, UnsupportedError
from reference_server.json_files import read_json
from reference_server.messages import ModelInfo, WarmupReply, WarmupRequest
from reference_server.model_server.decoding.grammar import Grammars
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
from reference_server.model_server.draft_cost import DraftCost
from reference_server.model_server.draft_heads.base_model import BaseModel
from reference_server.model_server.draft_heads.heads import DraftHeads, load_heads, num_drafted
from reference_server.model_server.draft_heads.source import HeadsSource
from reference_server.model_server.draft_sources import NgramSource
from reference_server.model_server.drafting import Drafter
from reference_server.model_server.forward.cuda_graph import graph_sizes
from reference_server.model_server.forward.prepare import prepare_model
from reference_server.model_server.intake import Intake
from reference_server.model_server.memory.cache_blocks import (
    GIB,
    blocks_in_free_memory,
    blocks_that_fit,
    device_bytes,
    peak_bytes_of,
)
from reference_server.model_server.memory.free_memory import freed_at_once, return_free_memory
from reference_server.model_server.memory.kv_cache import KVCache, blocks_for, bytes_per_block
from reference_server.model_server.models import loader
from reference_server.model_server.models.adapters import slots
from reference_server.model_server.models.adapters.loading import AdapterLoads
from reference_server.model_server.models.families import max_positions
from reference_server.model_server.models.loader import LoadedModel
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.speculation.hidden_states import HiddenStates
from reference_server.model_server.speculation.ngram import NgramRule
from reference_server.model_server.step_state import StepState
from reference_server.model_server.stepper import RunAhead, Stepper
from reference_server.model_server.token_choice import ChoosingOptions
from reference_server.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_BLOCKS_WITHOUT_KEYS = 1 << 20
"""Block numbers that a recurrent model's requests get, like all others; nothing is stored in them."""


class Engine:
    """A loaded model, its tokenizer and its cache."""

    def __init__(
        self,
        options: EngineOptions,
        group: RankGroup,
        loaded: LoadedModel,
        tokenizer: Tokenizer,
        tokenizer_max_len: int | None,
        speculator: Path | None = None,
    ) -> None:
        """speculator: the directory of the heads that draft for the model."""
        self.options = options
        self.loaded = loaded
        self.state = StepState()
        self._group = group
        self._tokenizer = tokenizer
        self._tokenizer_max_len = tokenizer_max_len
        # Before fusing, which takes the weights out of the modules.
        weight_bytes = loaded.weight_bytes
        self._speculate = num_drafted(speculator, options.speculate)
        if speculator is not None and self._speculate:
            self.state.hidden = HiddenStates()
        self.model = prepare_model(loaded, options, tokenizer, self.state)
        return_free_memory()
        self._block_size = self.model.choice.block_size
        heads = self._draft_heads(speculator)
        added_bytes = self.model.added_bytes + (0 if heads is None else heads.weight_bytes)
        self._weight_bytes = weight_bytes + added_bytes + self._load_adapters()
        self.adapter_loads = AdapterLoads(self.model.adapters, options.hub_cache, self.enter_thread)
        supports_chunking = self.model.choice.supports_chunking and not self.model.requires_padding
        vision = loaded.vision
        # Earlier tokens attend to later ones, which have to be in the same forward; the K/V of a prefix depend on them.
        has_prefixes = vision is None or not vision.has_bidirectional_prompts
        supports_chunking &= has_prefixes
        self._facts = ModelInfo(
            requires_padding=self.model.requires_padding,
            dtype=str(loaded.dtype),
            device_type=loaded.device.type,
            support_chunking=options.prefill_chunking and supports_chunking,
            use_prefix_caching=options.prefix_caching and has_prefixes and not self.model.requires_padding,
            attention_impl=self.model.choice.impl,
            block_size=self._block_size,
            accepts_schemas=True,
            speculate=self._speculate,
        )
        self.backends = self.model.backends
        if self._speculate:
            self.backends["drafts"] = "n-gram" if heads is None else heads.name
        grammars = Grammars(tokenizer, loaded.eos_ids)
        grammars.prepare()
        self.intake = Intake(
            *(self.model, self.state, tokenizer, grammars, loaded.eos_ids, self.info.support_chunking),
            vocab_size=loaded.config.vocab_size,
            max_positions=max_positions(loaded.config) if loaded.family.has_position_table else None,
            vision=loaded.vision,
        )
        choosing = ChoosingOptions(
            loaded.eos_ids,
            Watermark(options.watermark_gamma, options.watermark_delta),
            # A model that pads computes all logits of its prompts anyway.
            prompt_logprobs=options.request_logprobs or self.model.requires_padding,
        )
        self.stepper = Stepper(
            *(self.model.forward, self.state, tokenizer, group, choosing),
            *(self._run_ahead(), self._drafter(heads)),
        )

    @property
    def info(self) -> ModelInfo:
        """The facts, with the adapters that are loaded now."""
        adapters = self.model.adapters
        return self._facts if adapters is None else replace(self._facts, adapters=adapters.names)

    @classmethod
    def load(cls, options: EngineOptions, rank: int, world_size: int) -> "Engine":
        """Read the model's files; raises StartupError for what is not served."""
        torch.set_num_threads(options.compute_threads or default_compute_threads())
        device = choose_device(rank)
        make_current(device)
        prepare(device, options.memory_fraction)
        group = RankGroup(rank, world_size)
        files = loader.locate(options)
        num_drafted(files.speculator, options.speculate)

        def admit(weight_bytes: int) -> None:
            _refuse_too_large(options, weight_bytes, world_size, device)
            group.barrier()

        loaded = loader.load(options, files, group, admit=admit)
        group.barrier()
        tokenizer = load_tokenizer(
            files.tokenizer_directory,
            loaded.config.vocab_size,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
        max_len = _tokenizer_max_len(files.tokenizer_directory)
        engine = cls(options, group, loaded, tokenizer, max_len, files.speculator)
        logger.info(
            "loaded %s (%s, %s, %.2f GiB of weights); attention and kernels: %s",
            *(options.model_id, loaded.family.name, engine.info.dtype, engine._weight_bytes / GIB, engine.backends),
        )
        return engine

    def _load_adapters(self) -> int:
        """Load those of the start; returns the bytes that adapters may take."""
        adapters = self.model.adapters
        if adapters is None:
            return 0
        for source in self.options.adapters:
            adapters.load(source, slots.locate(source, self.options.hub_cache))
        return max(adapters.nbytes, self.options.adapter_bytes or 0)

    def _run_ahead(self) -> RunAhead:
        """An accelerator computes while the host reads; a CPU is both, so it replies first."""
        # A recurrent state cannot be stepped back.
        if not self.options.run_ahead or self.model.requires_padding:
            return RunAhead.OFF
        return RunAhead.AFTER_REPLY if self.loaded.device.type == "cpu" else RunAhead.BEFORE_READ

    def _draft_heads(self, speculator: Path | None) -> DraftHeads | None:
        """The heads of a speculator; raises StartupError if there can be no drafts, or not with these heads."""
        if self._speculate and self.model.requires_padding:
            remedy = "leave it out" if speculator is None else "give `--speculate 0`"
            raise UnsupportedError(
                f"`--speculate {self._speculate}` cannot be served with {type(self.loaded.model).__name__}: the "
                f"{self.model.tier.replace('_', '-')} tier verifies no drafts; {remedy}"
            )
        if speculator is None or not self._speculate:
            return None
        if self.options.ngram_rule is not NgramRule.SUFFIX:
            raise ArgumentError(
                f"`--ngram-rule {self.options.ngram_rule}` cannot be served with the heads in {speculator}: heads "
                "draft alone, without n-grams; leave it out, or give their base model as `--model-id`"
            )
        assert self.model.head is not None, "a ragged model has an output head"
        config = self.loaded.config.get_text_config()
        # OPT may project its last hidden states to the size of its embeddings.
        hidden_size = getattr(config, "word_embed_proj_dim", config.hidden_size)
        base = BaseModel(hidden_size, config.vocab_size, self.model.head)
        heads = load_heads(speculator, base, self.loaded.dtype, self.loaded.device)
        logger.info("drafts of up to %d tokens from the heads (%s) in %s", self._speculate, heads.name, speculator)
        return heads

    def _drafter(self, heads: DraftHeads | None) -> Drafter | None:
        if not self._speculate:
            return None
        source = NgramSource(self.options.ngram_rule) if heads is None else HeadsSource(heads, self._group)
        # With other ranks or devices, the time between two steps is not that of a step, or not the same for all.
        is_timed = self._group.world_size == 1 and self._run_ahead() is RunAhead.AFTER_REPLY
        clock = time.perf_counter_ns if is_timed else None
        return Drafter(source, self._speculate, self.model.longest_prefix, clock)

    def enter_thread(self) -> None:
        """Make the device current in the calling thread, which steps the model."""
        make_current(self.loaded.device)

    def check_device(self) -> None:
        """Compute on the device and wait for it; raises RuntimeError if it has failed."""
        torch.zeros((2, 2), device=self.loaded.device).tolist()

    def release_memory(self) -> None:
        """Return to the device the memory that no tensor holds; between steps only, since allocation is slow."""
        release_unused(self.loaded.device)

    def warmup(self, request: WarmupRequest) -> WarmupReply:
        """Run the largest prefill, then allocate the blocks that fit in the remaining memory."""
        block_size = self._block_size
        self.stepper.max_prefill_tokens = blocks_for(request.max_prefill_tokens, block_size) * block_size
        if self.model.graphs is not None:
            self.model.graphs.release()
        self.state.cache = None
        prompts = request.batch
        if self.loaded.vision is None:
            # TGI's router puts an image into every warm-up.
            texts = [replace(each, chunks=(each.text,)) for each in prompts.requests]
            prompts = replace(prompts, requests=tuple(texts))
        batch = self.intake.make_batch(prompts)
        prompt_tokens = sum(len(sequence.encoder_ids or sequence.ids) for sequence in batch.sequences)
        warmup_blocks = sum(len(sequence.blocks) for sequence in batch.sequences)
        too_much = (
            f"Not enough memory to handle {prompt_tokens} prefill tokens. You need to decrease "
            "`--max-batch-prefill-tokens`"
        )
        with _explained_out_of_memory(too_much):
            self.allocate_cache(warmup_blocks)
            with torch.no_grad(), freed_at_once(), peak_bytes_of(self.loaded.device) as tensors:
                output = self.stepper.step(batch)
        if output.dropped and self.loaded.vision is not None:
            raise ShardError("the warm-up's prompt with an image failed: the log has the reason")
        num_blocks = self._group.minimum(self._blocks_that_fit(tensors.peak, warmup_blocks))
        no_cache = f"Not enough memory for {num_blocks} K/V blocks. You need to decrease `--cuda-memory-fraction`"
        with _explained_out_of_memory(no_cache):
            self.allocate_cache(num_blocks)
        return_free_memory()
        capacity = num_blocks * block_size
        max_total = request.max_total_tokens or self._default_max_total(capacity, prompt_tokens)
        self._check_prefix_caching(max_total)
        logger.info("K/V cache: %d blocks of %d tokens", num_blocks, block_size)
        if self.model.requires_padding:
            self._check_capacity(capacity, max_total)
        self._capture(num_blocks, max_total)
        self._price_drafts(num_blocks, max_total)
        return WarmupReply(
            # The router budgets a padded model by rows and longest prompt, as the operator set it.
            max_supported_total_tokens=None if self.model.requires_padding else capacity,
            max_input_tokens=request.max_input_tokens or max_total - 1,
            max_total_tokens=max_total,
            weight_bytes=self._weight_bytes,
            prefill_peak_bytes=tensors.peak,
            backends=self.backends,
        )

    def allocate_cache(self, num_blocks: int) -> None:
        """Replace the cache by an empty one."""
        self.state.cache = None
        # The allocator's free pieces have the old cache's size and would not be reused.
        self.release_memory()
        self.state.cache = KVCache(
            *(self.model.shapes, num_blocks, self._block_size, self.model.cache_dtype, self.loaded.device),
            self.model.scales,
        )

    def _capture(self, num_blocks: int, max_total: int) -> None:
        """Record the decode steps that are replayed from here on. Block 0 is reserved; rows use the others."""
        graphs = self.model.graphs
        if graphs is None:
            return
        sizes = graph_sizes(self.options.cuda_graphs, num_blocks - 1)
        started = time.perf_counter()
        with self.stepper.no_gradients():
            graphs.capture(sizes, max_total)
        self.release_memory()
        logger.info("captured %d CUDA graphs in %.1f s", len(graphs.sizes), time.perf_counter() - started)

    def _price_drafts(self, num_blocks: int, max_total: int) -> None:
        """Measure the steps from which the drafter chooses the lengths of its drafts."""
        drafter = self.stepper.drafter
        if drafter is None or not self.options.speculate_adaptive:
            return
        cost = DraftCost(self.stepper, self._tokenizer, self._group, num_blocks, self._block_size, max_total)
        drafter.cost = cost.measure()

    def _check_prefix_caching(self, max_total: int) -> None:
        longest = self.model.longest_prefix
        if self.info.use_prefix_caching and longest is not None and max_total > longest:
            raise ShardError(
                f"`max_total_tokens` is {max_total}, but with long rope the keys of a request longer than {longest} "
                f"differ from those of its prefix: lower `--max-total-tokens` to {longest} or set "
                "`--prefix-caching false`"
            )

    def _check_capacity(self, capacity: int, max_total: int) -> None:
        """The router's check for a model that reports its cache; the router does not know a padded model's capacity."""
        if max_total > capacity:
            raise ShardError(
                f"not enough memory: `max_total_tokens` is {max_total}, but the key-value cache holds {capacity} "
                "tokens; lower `--max-total-tokens` or raise `--cpu-memory-gib` or `--cuda-memory-fraction`"
            )
        if self.model.shapes:
            logger.info("the K/V cache holds %d tokens: set `--max-batch-total-tokens` to no more", capacity)

    def _blocks_that_fit(self, peak_bytes: int, warmup_blocks: int) -> int:
        if not self.model.shapes:
            return _BLOCKS_WITHOUT_KEYS
        device = self.loaded.device
        block_bytes = bytes_per_block(self.model.shapes, self._block_size, self.model.cache_dtype)
        if device.type != "cpu":
            share = self.options.memory_fraction * self.options.wiggle_room
            adapters = self.model.adapters
            later_bytes = 0 if adapters is None else max(0, (self.options.adapter_bytes or 0) - adapters.nbytes)
            return blocks_in_free_memory(DeviceMemory.of(device), share, block_bytes, later_bytes) + warmup_blocks
        budget = device_bytes(self.options) * self.options.memory_fraction / self._group.world_size
        return blocks_that_fit(budget, self._weight_bytes, peak_bytes, block_bytes)

    def _default_max_total(self, capacity: int, prompt_tokens: int) -> int:
        if not self.info.support_chunking:
            return prompt_tokens
        positions = max_positions(self.loaded.config)
        return min(limit for limit in (capacity, positions, self._tokenizer_max_len) if limit)


def _refuse_too_large(options: EngineOptions, weight_bytes: int, world_size: int, device: torch.device) -> None:
    """Raise ArgumentError before minutes of loading. `device` is this rank's; the query itself takes memory on it."""
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
def _explained_out_of_memory(explanation: str) -> Iterator[None]:
    """Raise RuntimeError of `explanation` and the first line of the allocator's error, which has the bytes."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(f"{explanation}: {first_line(error)}") from error


def default_compute_threads() -> int:
    """All cores but one, which the router and the client use."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _tokenizer_max_len(directory: Path) -> int | None:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    length = read_json(path).get("model_max_length")
    return int(length) if length else None
