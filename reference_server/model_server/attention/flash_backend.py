"""Paged attention by the flash-attn package, where it is installed: CUDA, 16-bit; softcap, ALiBi and windows."""

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reference_server.model_server.attention import triton_backend, varlen_backend
from reference_server.model_server.attention.staging import on_device
from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions

if TYPE_CHECKING:
    from reference_server.model_server.attention.backend import AttentionNeeds

PAGE = 256


class FlashPrefill:
    """Several query tokens a row, over block tables."""

    name = "flash"
    block_size = PAGE
    is_capturable = False

    def supports(self, needs: "AttentionNeeds", /) -> bool:
        return _is_offered(needs)

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        placed = on_device(metadata, cache.device)
        rows = slice(metadata.num_decode_rows, None)
        keys, values = varlen_backend.pages(cache)
        attended: Tensor = package().flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            cu_seqlens_q=placed.cu_seqlen_q,
            cu_seqlens_k=placed.cu_seqlen_k,
            max_seqlen_q=int(metadata.seqlen_q[rows].max()),
            max_seqlen_k=int(metadata.seqlen_k[rows].max()),
            block_table=placed.block_table[rows],
            **_options(options),
        )
        return attended


class FlashDecode:
    """One query token a row, over block tables, lengths on the device."""

    name = "flash"
    block_size = PAGE
    is_capturable = True
    store = staticmethod(triton_backend.store)

    def supports(self, needs: "AttentionNeeds", /) -> bool:
        return _is_offered(needs) and triton_backend.is_offered(needs)

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        placed = on_device(metadata, cache.device)
        rows = len(query)
        keys, values = varlen_backend.pages(cache)
        attended: Tensor = package().flash_attn_with_kvcache(
            q=query[:, None],
            k_cache=keys,
            v_cache=values,
            cache_seqlens=placed.seqlen_k[:rows],
            block_table=placed.block_table[:rows],
            **_options(options),
        )
        return attended[:, 0]


@functools.cache
def package() -> Any:
    """flash-attn, imported when a kernel is first asked for."""
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


def _is_offered(needs: "AttentionNeeds") -> bool:
    return (
        needs.device_type == "cuda"
        and needs.dtype in varlen_backend.DTYPES
        and all(head_dim % 8 == 0 and head_dim <= varlen_backend.LARGEST_HEAD for head_dim in needs.head_dims)
        and (needs.block_size or PAGE) % PAGE == 0
        and importlib.util.find_spec("flash_attn") is not None
        and torch.cuda.get_device_capability() >= varlen_backend.LEAST_CAPABILITY
    )
