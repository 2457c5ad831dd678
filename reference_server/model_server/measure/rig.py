"""A preset on the device: seeded random weights, a cache filled with noise, batches as after prefill."""

import gc
import itertools
import time
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.decoding.watermark import Watermark
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.forward.cuda_graph import graph_sizes
from reference_server.model_server.forward.prepare import prepare_model
from reference_server.model_server.measure.record import MeasurePlan
from reference_server.model_server.memory.cache_blocks import available_bytes
from reference_server.model_server.memory.kv_cache import KVCache, blocks_for, bytes_per_block
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.step_state import StepState
from reference_server.model_server.stepper import RunAhead, Stepper
from reference_server.model_server.token_choice import ChoosingOptions
from reference_server.tokenizer import load_tokenizer

# Tokens that a sequence may grow by while it is timed.
MAX_NEW_TOKENS = 320
MEMORY_FRACTION = 0.9
# Blocks of a layer that are filled with noise at once.
NOISE_BLOCKS = 1024


class Rig:
    """A model as the engine loads it, with access to its parts."""

    def __init__(
        self,
        preset: str,
        plan: MeasurePlan,
        attention: str | None = None,
        *,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        load_format: Literal["auto", "dummy"] = "dummy",
        graphs: bool = True,
        kv_cache_dtype: Literal["fp8_e4m3fn", "fp8_e5m2"] | None = None,
    ) -> None:
        started = time.monotonic()
        self.preset = preset
        options = EngineOptions(
            f"preset:{preset}",
            dtype=dtype,
            load_format=load_format,
            attention=attention,
            cuda_graphs=None if graphs else (0,),
            kv_cache_dtype=kv_cache_dtype,
        )
        files = loader.locate(options)
        self.loaded = loader.load(options, files, RankGroup())
        self.device = self.loaded.device
        self.tokenizer = load_tokenizer(files.tokenizer_directory, self.loaded.config.vocab_size)
        self.state = StepState()
        self.prepared = prepare_model(self.loaded, options, self.tokenizer, self.state)
        self.block_size = self.prepared.choice.block_size
        self.max_total = max(*plan.contexts, *(length for _, length in plan.prefills)) + MAX_NEW_TOKENS
        self.state.cache = self._cache(plan)
        if self.prepared.graphs is not None:
            sizes = sorted({*plan.batches, *plan.engine_batches})
            self.prepared.graphs.capture(graph_sizes(tuple(sizes), self.state.cache.num_blocks - 1), self.max_total)
        choosing = ChoosingOptions(self.loaded.eos_ids, Watermark(0.5, 2.0), prompt_logprobs=False)
        self.stepper = Stepper(self.prepared.forward, self.state, self.tokenizer, RankGroup(), choosing, RunAhead.OFF)
        self.run_ahead = RunAhead.AFTER_REPLY if self.device.type == "cpu" else RunAhead.BEFORE_READ
        self.loaded_s = time.monotonic() - started

    def _cache(self, plan: MeasurePlan) -> KVCache:
        """A cache for the largest batch, or as large as fits in memory."""
        dtype, shapes = self.prepared.cache_dtype, self.prepared.shapes
        needed = max(
            max(plan.batches) * blocks_for(max(plan.contexts) + MAX_NEW_TOKENS, self.block_size),
            *(rows * blocks_for(length + MAX_NEW_TOKENS, self.block_size) for rows, length in plan.prefills),
        )
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_bytes() // 4
        available = int(free * MEMORY_FRACTION) // bytes_per_block(shapes, self.block_size, dtype)
        cache = KVCache(shapes, min(needed, available) + 1, self.block_size, dtype, self.device)
        for layer in cache.layers:
            # Kernels run faster over zeros than over anything else.
            noise = torch.empty_like(layer.buffer[:NOISE_BLOCKS], dtype=self.loaded.dtype)
            for blocks in torch.split(layer.buffer, NOISE_BLOCKS):
                blocks.copy_(noise[: len(blocks)].normal_())
        return cache

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether `rows` sequences of `tokens` tokens fit in the cache."""
        assert self.state.cache is not None
        return rows * blocks_for(tokens, self.block_size) < self.state.cache.num_blocks

    def batch(self, rows: int, context: int, new_tokens: int, is_prefilled: bool) -> SequenceBatch:
        """Sequences of random ids in separate blocks, before their prefill or with `context` tokens in the cache."""
        random = np.random.default_rng(rows * context)
        vocab_size = self.loaded.config.vocab_size
        blocks = itertools.count(1)
        sequences = []
        for row in range(rows):
            ids = random.integers(0, vocab_size, context).tolist()
            stopping = StoppingParameters(new_tokens, ignore_eos_token=True)
            request = Request(row, ("",), context, ChooserParameters(), stopping)
            needed = blocks_for(context + new_tokens, self.block_size)
            block_table = np.array(list(itertools.islice(blocks, needed)), dtype=np.int64)
            sequences.append(
                Sequence(
                    request=request,
                    ids=ids,
                    prompt_len=context,
                    cache_len=0,
                    input_len=context,
                    blocks=block_table,
                    stopping=StoppingCriteria(stopping, frozenset()),
                    detokenizer=IncrementalDetokenizer(self.tokenizer, ids),
                )
            )
        if is_prefilled:
            for sequence in sequences:
                sequence.ids.append(int(random.integers(0, vocab_size)))
                sequence.cache_len, sequence.input_len = context, 1
        return SequenceBatch(rows, tuple(sequences), self.block_size)

    def facts(self) -> dict[str, Any]:
        assert self.state.cache is not None
        graphs = self.prepared.graphs
        return {
            **self.prepared.backends,
            "dtype": str(self.loaded.dtype),
            "block_size": self.block_size,
            "num_blocks": self.state.cache.num_blocks,
            "graphs": [] if graphs is None else graphs.sizes,
            "loaded_s": round(self.loaded_s, 1),
        }

    def close(self) -> None:
        """Release the model, its graphs and its cache."""
        if self.prepared.graphs is not None:
            self.prepared.graphs.release()
        self.state.cache = None
        del self.loaded, self.prepared, self.stepper


def release() -> None:
    """Collect garbage and return unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Floors:
    """The least time of a step, from the weights and shapes of a preset and the ceilings of this run."""

    def __init__(self, preset: str, ceilings: dict[str, float]) -> None:
        directory = loader.locate(EngineOptions(f"preset:{preset}")).directory
        config = AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        embedding = {
            id(weight) for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        }
        # Embedding and position tables are not multiplied.
        self.projections: int = sum(
            weight.numel()
            for name, weight in model.named_parameters()
            if weight.dim() > 1 and id(weight) not in embedding and "embed" not in name and "wpe" not in name
        )
        self.head: int = config.vocab_size * config.hidden_size
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.itemsize = 2
        self.bytes_per_s = ceilings.get("copy_bytes_per_s")
        self.flop_per_s = ceilings.get("bf16_flop_per_s")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K/V of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    def decode_ms(self, rows: int, context: float) -> float | None:
        if not (self.bytes_per_s and self.flop_per_s):
            return None
        weights = self.projections + self.head
        products_s = max(weights * self.itemsize / self.bytes_per_s, 2 * rows * weights / self.flop_per_s)
        return (products_s + rows * context * self.bytes_per_token / self.bytes_per_s) * 1e3

    def prefill_ms(self, rows: int, length: int) -> float | None:
        if not self.flop_per_s:
            return None
        attention = 4 * self.layers * self.heads * self.head_dim * length * (length + 1) / 2
        flop = 2 * self.projections * rows * length + rows * (attention + 2 * self.head)
        return flop / self.flop_per_s * 1e3
