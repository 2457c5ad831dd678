"""Paged decode and prefill by the flashinfer package, where it is installed and `--attention flashinfer` asks for it.

Its wrappers plan a forward on the host and keep the plan on the device, so they are not captured in graphs; the cache
has the layout that the package calls HND. ALiBi stays with the other kernels.
"""

import functools
import importlib.util
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.attention import triton_backend, varlen_backend
from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions

if TYPE_CHECKING:
    from reference_server.model_server.attention.backend import AttentionNeeds

WORKSPACE_BYTES = 128 << 20
PAGE = 1
LAYOUT = "HND"


class FlashInferPrefill:
    """Several query tokens a row."""

    name = "flashinfer"
    block_size = PAGE
    is_capturable = False

    def supports(self, needs: "AttentionNeeds", /) -> bool:
        return _is_offered(needs)

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        rows = slice(metadata.num_decode_rows, None)
        key = ("flashinfer prefill", *query.shape[1:], cache.shape[2], options.window, options.softcap)
        wrapper = prefill_wrapper(cache.device, key)
        if key not in metadata.step_memo:
            ends = np.concatenate(([0], np.cumsum(metadata.seqlen_q[rows]))).astype(np.int32)
            wrapper.plan(
                *(torch.from_numpy(ends), *_page_plan(metadata, rows, cache.shape[3]), *_heads(query, cache)),
                **_options(query, options),
                causal=True,
            )
            metadata.step_memo[key] = "planned"
        attended: Tensor = wrapper.run(query, cache)
        return attended


class FlashInferDecode:
    """One query token a row."""

    name = "flashinfer"
    block_size = PAGE
    is_capturable = False
    store = staticmethod(triton_backend.store)

    def supports(self, needs: "AttentionNeeds", /) -> bool:
        return _is_offered(needs) and triton_backend.is_offered(needs)

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        rows = slice(0, len(query))
        key = ("flashinfer decode", *query.shape[1:], cache.shape[2], options.window, options.softcap)
        wrapper = decode_wrapper(cache.device, key, query.shape[1] // cache.shape[2])
        if key not in metadata.step_memo:
            plan = _page_plan(metadata, rows, cache.shape[3])
            wrapper.plan(*plan, *_heads(query, cache), **_options(query, options))
            metadata.step_memo[key] = "planned"
        attended: Tensor = wrapper.run(query, cache)
        return attended


@functools.cache
def package() -> Any:
    """flashinfer, imported when a kernel is first asked for."""
    import flashinfer

    return flashinfer


@functools.cache
def prefill_wrapper(device: torch.device, _key: Hashable) -> Any:
    """One for each kind of layer: a plan holds for the layers that are alike."""
    return package().BatchPrefillWithPagedKVCacheWrapper(workspace(device), LAYOUT)


@functools.cache
def decode_wrapper(device: torch.device, _key: Hashable, group: int) -> Any:
    """One for each kind of layer; `group` is the query heads that share a K/V head."""
    # Those that the kernel without tensor cores is compiled for.
    is_special = group in (1, 2, 4, 8)
    return package().BatchDecodeWithPagedKVCacheWrapper(workspace(device), LAYOUT, use_tensor_cores=not is_special)


@functools.cache
def workspace(device: torch.device) -> Tensor:
    """What all wrappers of a device share."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _page_plan(metadata: AttentionMetadata, rows: slice, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each row's pages begin in a list of all, that list, and how full each row's last page is."""
    lengths, table = metadata.seqlen_k[rows], metadata.block_table[rows]
    counts = -(-lengths // block_size)
    indptr: NDArray[np.int64] = np.concatenate(([0], np.cumsum(counts)))
    indices = np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)])
    last_page = lengths - (counts - 1) * block_size
    whole, listed, last = (torch.from_numpy(array.astype(np.int32)) for array in (indptr, indices, last_page))
    return whole, listed, last


def _heads(query: Tensor, cache: Tensor) -> tuple[int, int, int, int]:
    """Query heads, K/V heads, head size, page: by place, since the two plans name the head size differently."""
    return query.shape[1], cache.shape[2], query.shape[2], cache.shape[3]


def _options(query: Tensor, options: AttentionOptions) -> dict[str, Any]:
    return {
        "sm_scale": options.scaling,
        "window_left": varlen_backend.window_of(options)[0],
        "logits_soft_cap": options.softcap,
        "q_data_type": query.dtype,
        "kv_data_type": query.dtype,
    }


def _is_offered(needs: "AttentionNeeds") -> bool:
    return (
        needs.device_type == "cuda"
        and needs.dtype in varlen_backend.DTYPES
        and all(head_dim in (64, 128, 256) for head_dim in needs.head_dims)
        and not needs.has_alibi
        and importlib.util.find_spec("flashinfer") is not None
        and torch.cuda.get_device_capability() >= varlen_backend.LEAST_CAPABILITY
    )
