"""Attention of the compiled CPU kernels: reads K/V where they lie in the cache, gathers nothing and builds no mask."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions
from reference_server.model_server.attention.torch_backend import TorchPrefill
from reference_server.model_server.cpu_kernels import build

if TYPE_CHECKING:
    from reference_server.model_server.attention.backend import AttentionNeeds

DTYPES = (torch.float32, torch.bfloat16)
# Above this many keys SDPA is as fast, where it needs no mask: against it 1.7 times as fast at 128 and 512 keys of a
# 64-wide head and 0.95 at 2048; with ALiBi 2.8 and 3.9.
SDPA_KEYS = 1024


class CompiledDecode:
    """One query token a row, over block tables; the reference is the torch backend's decode."""

    name = "compiled"
    block_size = 16
    is_capturable = False

    def supports(self, needs: "AttentionNeeds", /) -> bool:
        return needs.device_type == "cpu" and needs.dtype in DTYPES and build.kernels() is not None

    def store(self, key_value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        """Write new keys and values into their slots, as the torch backend's `store`."""
        slots = metadata.step_memo.get("slots")
        if slots is None:
            slots = metadata.step_memo["slots"] = torch.from_numpy(metadata.slots)
        torch.ops.reference_server_cpu.store(cache, _contiguous_heads(key_value), slots)

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        tables = metadata.step_memo.get("decode tables")
        if tables is None:
            tables = (torch.from_numpy(metadata.block_table), torch.from_numpy(metadata.seqlen_k))
            metadata.step_memo["decode tables"] = tables
        attended: Tensor = torch.ops.reference_server_cpu.attend_decode(
            _together(query), cache, *tables, *_values_of(options)
        )
        return attended


class CompiledPrefill:
    """Several query tokens a row, over block tables; the reference is the torch backend's prefill."""

    name = "compiled"
    block_size = 16
    is_capturable = False

    def __init__(self) -> None:
        self._sdpa = TorchPrefill()

    def supports(self, needs: "AttentionNeeds", /) -> bool:
        return CompiledDecode().supports(needs)

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        is_masked = (options.window, options.softcap, options.alibi_slopes) != (None, None, None)
        if metadata.max_k > SDPA_KEYS and not is_masked:
            return self._sdpa(query, cache, metadata, options)
        tables = metadata.step_memo.get("prefill tables")
        if tables is None:
            parts = (metadata.block_table, metadata.seqlen_q, metadata.seqlen_k)
            tables = tuple(torch.from_numpy(part[metadata.num_decode_rows :]) for part in parts)
            metadata.step_memo["prefill tables"] = tables
        attended: Tensor = torch.ops.reference_server_cpu.attend_prefill(
            _together(query), cache, *tables, *_values_of(options)
        )
        return attended


def _together(query: Tensor) -> Tensor:
    return query if query.stride(1) == query.shape[2] and query.stride(2) == 1 else query.contiguous()


def _values_of(options: AttentionOptions) -> tuple[float, int, float, Tensor | None]:
    return options.scaling, options.window or 0, options.softcap or 0.0, options.alibi_slopes


def _contiguous_heads(key_value: Tensor) -> Tensor:
    return key_value if key_value.stride(3) == 1 else key_value.contiguous()
