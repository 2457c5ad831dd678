"""Decode attention of the compiled CPU kernels: reads K/V where they lie in the cache and gathers nothing."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions
from reference_server.model_server.cpu_kernels import build

if TYPE_CHECKING:
    from reference_server.model_server.attention.backend import AttentionNeeds

DTYPES = (torch.float32, torch.bfloat16)


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
        if query.stride(1) != query.shape[2] or query.stride(2) != 1:
            query = query.contiguous()
        attended: Tensor = torch.ops.reference_server_cpu.attend_decode(
            query, cache, *tables, options.scaling, options.window or 0, options.softcap or 0.0, options.alibi_slopes
        )
        return attended


def _contiguous_heads(key_value: Tensor) -> Tensor:
    return key_value if key_value.stride(3) == 1 else key_value.contiguous()
