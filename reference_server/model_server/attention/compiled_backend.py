"""Attention of the compiled CPU kernels: reads K/V in place, gathers nothing and builds no mask."""

import torch
from torch import Tensor

from reference_server.model_server.attention.kernel import AttentionNeeds, AttentionOptions
from reference_server.model_server.attention.torch_backend import TorchPrefill
from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.step_state import Step

DTYPES = (torch.float32, torch.bfloat16)
# Above this many keys, SDPA without a mask is as fast. The compiled kernel is 1.7 times as fast as SDPA at 128 and
# 512 keys of a 64-wide head and 0.95 times at 2048; with ALiBi 2.8 and 3.9 times. With AVX2: 1.4, 1.1 and 0.6 times.
SDPA_KEYS = 1024


def is_offered(needs: AttentionNeeds) -> bool:
    """Whether the compiled kernels are available and support this type."""
    return needs.device_type == "cpu" and needs.dtype in DTYPES and build.kernels() is not None


class CompiledDecode:
    """One query token a row, over block tables; the reference is the torch backend's decode."""

    name = "compiled"
    block_size = 16
    is_capturable = False

    def __init__(self) -> None:
        self._attend = torch.ops.reference_server_cpu.attend_decode.default

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool:
        return is_offered(needs)

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        tensors = step.tensors
        attended: Tensor = self._attend(
            _rows_together(query), cache.buffer, tensors.block_table, tensors.seqlen_k, *_values_of(options)
        )
        return attended


class CompiledPrefill:
    """Several query tokens a row, over block tables; the reference is the torch backend's prefill."""

    name = "compiled"
    block_size = 16
    is_capturable = False

    def __init__(self) -> None:
        self._attend = torch.ops.reference_server_cpu.attend_prefill.default
        self._sdpa = TorchPrefill()

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool:
        return is_offered(needs)

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        metadata = step.metadata
        if metadata.max_k > SDPA_KEYS and not options.is_masked:
            return self._sdpa(query, cache, step, options)
        parts = (metadata.block_table, metadata.seqlen_q, metadata.seqlen_k)
        tables = [torch.from_numpy(part[metadata.num_single_rows :]) for part in parts]
        attended: Tensor = self._attend(_rows_together(query), cache.buffer, *tables, *_values_of(options))
        return attended


def _rows_together(query: Tensor) -> Tensor:
    """The query with the elements of a token's heads side by side."""
    return query if query.stride(1) == query.shape[2] and query.stride(2) == 1 else query.contiguous()


def _values_of(options: AttentionOptions) -> tuple[float, int, float, Tensor | None]:
    return options.scaling, options.window or 0, options.softcap or 0.0, options.alibi_slopes
