"""Paged decode and prefill by the flashinfer package, where it is installed and `--attention flashinfer` is set.

Its wrappers plan each forward on the host and keep the plan on the device, so a CUDA graph cannot capture them. The
cache has the layout that the package calls HND. Models with ALiBi use the other kernels.
"""

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.attention import triton_backend, varlen_backend
from reference_server.model_server.attention.kernel import AttentionNeeds, AttentionOptions
from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.step_state import Step, StepMetadata

WORKSPACE_BYTES = 128 << 20
PAGE = 1
LAYOUT = "HND"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of one kind share a plan. scaling: with the scale of the layer's keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, query: Tensor, cache: LayerCache, options: AttentionOptions) -> "LayerKind":
        heads = (query.shape[1], cache.shape.num_kv_heads, query.shape[2])
        return cls(*heads, options.scaling, options.window, options.softcap)


@dataclass(slots=True)
class PlannedWrapper:
    """A wrapper of the package, and the step that it is planned for."""

    wrapper: Any
    step: Step | None = None


class FlashInferPrefill:
    """Several query tokens a row."""

    name = "flashinfer"
    block_size = PAGE
    is_capturable = False

    def __init__(self) -> None:
        self._wrappers: dict[LayerKind, PlannedWrapper] = {}

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool:
        return _is_offered(needs)

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        metadata, kind = step.metadata, LayerKind.of(query, cache, options)
        if kind not in self._wrappers:
            make = package().BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[kind] = PlannedWrapper(make(workspace(cache.buffer.device), LAYOUT))
        planned = self._wrappers[kind]
        if planned.step is not step:
            rows = slice(metadata.num_single_rows, None)
            ends = np.concatenate(([0], np.cumsum(metadata.seqlen_q[rows]))).astype(np.int32)
            planned.wrapper.plan(
                *(torch.from_numpy(ends), *_page_plan(metadata, rows, cache.block_size), *_heads(kind, cache)),
                **_options(query, cache, options),
                causal=True,
            )
            planned.step = step
        attended: Tensor = planned.wrapper.run(query, cache.buffer)
        return attended


class FlashInferDecode:
    """One query token a row."""

    name = "flashinfer"
    block_size = PAGE
    is_capturable = False

    def __init__(self) -> None:
        self._wrappers: dict[LayerKind, PlannedWrapper] = {}

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool:
        # Triton stores the K/V.
        return _is_offered(needs) and triton_backend.is_offered(needs)

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        kind = LayerKind.of(query, cache, options)
        if kind not in self._wrappers:
            # The kernel without tensor cores is compiled for these group sizes only.
            is_special = kind.num_heads // kind.num_kv_heads in (1, 2, 4, 8)
            make = package().BatchDecodeWithPagedKVCacheWrapper
            wrapper = make(workspace(cache.buffer.device), LAYOUT, use_tensor_cores=not is_special)
            self._wrappers[kind] = PlannedWrapper(wrapper)
        planned = self._wrappers[kind]
        if planned.step is not step:
            plan = _page_plan(step.metadata, slice(0, len(query)), cache.block_size)
            planned.wrapper.plan(*plan, *_heads(kind, cache), **_options(query, cache, options))
            planned.step = step
        attended: Tensor = planned.wrapper.run(query, cache.buffer)
        return attended


@functools.cache
def package() -> Any:
    """flashinfer, imported when a kernel is first called."""
    import flashinfer

    return flashinfer


@functools.cache
def workspace(device: torch.device) -> Tensor:
    """Scratch memory that all wrappers of a device share."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _page_plan(metadata: StepMetadata, rows: slice, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The start of each row's pages in a list of all pages, that list, and the tokens in each row's last page."""
    lengths, table = metadata.seqlen_k[rows], metadata.block_table[rows]
    counts = -(-lengths // block_size)
    indptr: NDArray[np.int64] = np.concatenate(([0], np.cumsum(counts)))
    indices = np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)])
    last_page = lengths - (counts - 1) * block_size
    starts, pages, last = (torch.from_numpy(array.astype(np.int32)) for array in (indptr, indices, last_page))
    return starts, pages, last


def _heads(kind: LayerKind, cache: LayerCache) -> tuple[int, int, int, int]:
    """Positional arguments, since the two plans name the head size differently."""
    return kind.num_heads, kind.num_kv_heads, kind.head_dim, cache.block_size


def _options(query: Tensor, cache: LayerCache, options: AttentionOptions) -> dict[str, Any]:
    return {
        "sm_scale": options.scaling,
        "window_left": varlen_backend.window_of(options)[0],
        "logits_soft_cap": options.softcap,
        "q_data_type": query.dtype,
        "kv_data_type": cache.buffer.dtype,
    }


def _is_offered(needs: AttentionNeeds) -> bool:
    return (
        needs.device_type == "cuda"
        and needs.dtype in varlen_backend.DTYPES
        and all(head_dim in (64, 128, 256) for head_dim in needs.head_dims)
        and not needs.has_alibi
        and importlib.util.find_spec("flashinfer") is not None
        and torch.cuda.get_device_capability() >= varlen_backend.LEAST_CAPABILITY
    )
