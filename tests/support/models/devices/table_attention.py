"""Decode attention that reads nothing but a step's device tensors, as the kernels that graphs capture do; in torch."""

import torch
from torch import Tensor

from reference_server.model_server.attention.kernel import AttentionNeeds, AttentionOptions
from reference_server.model_server.attention.select import AttentionBackend
from reference_server.model_server.attention.torch_backend import TorchPrefill
from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.step_state import Step


class TableDecode:
    """One query token a row over every page of its table, masked by its length."""

    name = "tables"
    block_size = 16
    is_capturable = True

    @staticmethod
    def supports(_needs: AttentionNeeds, /) -> bool:
        return True

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        tensors, num_kv_heads = step.tensors, cache.shape.num_kv_heads
        rows, num_heads, head_dim = query.shape
        pages = cache.buffer[tensors.block_table[:rows].long()]
        keys, values = pages.permute(2, 0, 3, 1, 4, 5).reshape(2, rows, num_kv_heads, -1, head_dim)
        group = num_heads // num_kv_heads
        scores = torch.einsum("rhgd,rhkd->rhgk", query.view(rows, -1, group, head_dim), keys) * options.scaling
        distance = torch.arange(keys.shape[2], device=query.device) - (tensors.seqlen_k[:rows, None] - 1)
        seen = distance <= 0
        if options.window is not None:
            seen &= distance > -options.window
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        if options.alibi_slopes is not None:
            scores = scores + options.alibi_slopes.view(-1, group)[None, :, :, None] * distance[:, None, None]
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1).nan_to_num()
        attended = torch.einsum("rhgk,rhkd->rhgd", weights.to(values.dtype), values.nan_to_num())
        return attended.reshape(query.shape)


class TableStore:
    """Writes to the slots of the step's device tensors."""

    def __call__(self, key_value: Tensor, cache: LayerCache, step: Step) -> None:
        slots = step.tensors.slots
        cache.buffer[slots // cache.block_size, :, :, slots % cache.block_size] = key_value


TABLES = AttentionBackend("tables", TorchPrefill, TableDecode, TableStore)
