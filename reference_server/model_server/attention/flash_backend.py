"""Paged attention by the flash-attn package, where it is installed: CUDA, 16-bit; softcap, ALiBi and windows."""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from reference_server.model_server.attention import triton_backend, varlen_backend
from reference_server.model_server.attention.kernel import AttentionNeeds, AttentionOptions
from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.step_state import Step

PAGE = 256


class FlashPrefill:
    """Several query tokens a row, over block tables."""

    name = "flash"
    block_size = PAGE
    is_capturable = False

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool:
        return _is_offered(needs)

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        metadata, tensors = step.metadata, step.tensors
        rows = slice(metadata.num_single_rows, None)
        keys, values = cache.pages()
        attended: Tensor = package().flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            cu_seqlens_q=tensors.cu_seqlen_q,
            cu_seqlens_k=tensors.cu_seqlen_k,
            max_seqlen_q=int(metadata.seqlen_q[rows].max()),
            max_seqlen_k=int(metadata.seqlen_k[rows].max()),
            block_table=tensors.block_table[rows],
            **_options(options),
        )
        return attended


class FlashDecode:
    """One query token a row, over block tables, lengths on the device."""

    name = "flash"
    block_size = PAGE
    is_capturable = True

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool:
        # Triton stores the K/V.
        return _is_offered(needs) and triton_backend.is_offered(needs)

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        rows = len(query)
        keys, values = cache.pages()
        attended: Tensor = package().flash_attn_with_kvcache(
            q=query[:, None],
            k_cache=keys,
            v_cache=values,
            cache_seqlens=step.tensors.seqlen_k[:rows],
            block_table=step.tensors.block_table[:rows],
            **_options(options),
        )
        return attended[:, 0]


@functools.cache
def package() -> Any:
    """flash-attn, imported when a kernel is first called."""
    import flash_attn

    return flash_attn


def _options(options: AttentionOptions) -> dict[str, Any]:
    return {
        "softmax_scale": options.scaling,
        "causal": True,
        "window_size": varlen_backend.window_of(options),
        "softcap": options.softcap or 0.0,
        "alibi_slopes": options.alibi_slopes,
    }


def _is_offered(needs: AttentionNeeds) -> bool:
    return (
        needs.device_type == "cuda"
        and needs.dtype in varlen_backend.DTYPES
        and needs.cache_dtype is None
        and all(head_dim % 8 == 0 and head_dim <= varlen_backend.LARGEST_HEAD for head_dim in needs.head_dims)
        and (needs.block_size or PAGE) % PAGE == 0
        and importlib.util.find_spec("flash_attn") is not None
        and torch.cuda.get_device_capability() >= varlen_backend.LEAST_CAPABILITY
    )
