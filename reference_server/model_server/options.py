"""What the engine needs of the configuration, as a plain frozen dataclass; no reading of flags or environment here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

WIGGLE_ROOM = 0.90

Tier = Literal["ragged", "padded", "encoder_decoder", "recurrent"]


@dataclass(frozen=True, slots=True)
class RopeOverride:
    """`--rope-scaling` and `--rope-factor`: replace what the model's config says about position scaling."""

    type: Literal["linear", "dynamic"]
    factor: float


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How one model is loaded and run.

    `weights_override` is a flat directory that holds the weight files. `quantize` None takes what the checkpoint is
    quantized with, if it is. `dtype` None takes bfloat16 where the CPU multiplies it natively, else float32.
    `cpu_memory_gib` is the memory that counts as the device's on a CPU, for all
    ranks together; None takes the smaller of 4 GiB and half of what is available. `wiggle_room` scales
    `memory_fraction` on accelerators only. `compute_threads` None takes cores - 1. `tier` None takes the family's own.
    `cuda_graphs` are the row counts to capture; (0,) captures none, None takes the shard's list.
    """

    model_id: str
    revision: str | None = None
    dtype: Literal["float16", "bfloat16", "float32"] | None = None
    quantize: str | None = None
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
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    seed: int = 0
    tier: Tier | None = None
    cuda_graphs: tuple[int, ...] | None = None
