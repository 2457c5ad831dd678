"""The part of the configuration that the engine needs, as a plain frozen dataclass; reads no flags or environment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reference_server.adapter_source import AdapterSource
from reference_server.model_server.speculation.ngram import NgramRule

WIGGLE_ROOM = 0.90

Tier = Literal["ragged", "padded", "encoder_decoder", "recurrent"]


@dataclass(frozen=True, slots=True)
class RopeOverride:
    """`--rope-scaling` and `--rope-factor`: replace the position scaling of the model's config."""

    type: Literal["linear", "dynamic"]
    factor: float


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The settings with which one model is loaded and run.

    weights_override: a flat directory that holds the weight files. quantize: None is the checkpoint's own quantization.
    dtype: None is bfloat16 where the CPU multiplies it natively, else float32. cpu_memory_gib: the memory that counts
    as the device's on a CPU, for all ranks together; None is the smaller of 4 GiB and half of the available memory.
    wiggle_room: scales `memory_fraction` on accelerators only. compute_threads: None is cores - 1. tier: None is the
    family's own. cuda_graphs: the row counts to capture; (0,) captures none, None is the shard's list.
    compiled_walk: whether a decode step is one operator, where it can be. speculate: most tokens of a draft; 0 is no
    drafts, None all heads of a speculator and none without one. adapters: loaded at start. max_adapters: of those
    loaded at once. adapter_bytes: the memory that is kept for adapters loaded later; None if there are none.
    kv_cache_dtype: an eight-bit type of the K/V cache; None is the compute type.
    """

    model_id: str
    revision: str | None = None
    hub_cache: Path | None = None
    dtype: Literal["float16", "bfloat16", "float32"] | None = None
    quantize: str | None = None
    kv_cache_dtype: Literal["fp8_e4m3fn", "fp8_e5m2"] | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    weights_override: Path | None = None
    memory_fraction: float = 1.0
    wiggle_room: float = WIGGLE_ROOM
    cpu_memory_gib: float | None = None
    prefill_chunking: bool = True
    prefix_caching: bool = False
    request_logprobs: bool = False
    attention: str | None = None
    max_input_tokens: int | None = None
    trust_remote_code: bool = False
    rope: RopeOverride | None = None
    run_ahead: bool = True
    compute_threads: int | None = None
    fuse: bool = True
    compiled_walk: bool = True
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    seed: int = 0
    tier: Tier | None = None
    cuda_graphs: tuple[int, ...] | None = None
    speculate: int | None = None
    ngram_rule: NgramRule = NgramRule.SUFFIX
    speculate_adaptive: bool = True
    adapters: tuple[AdapterSource, ...] = ()
    max_adapters: int = 64
    adapter_bytes: int | None = None

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are loaded at start, or may be loaded later."""
        return bool(self.adapters) or self.adapter_bytes is not None
