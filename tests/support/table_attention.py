"""Decode attention that reads nothing but a step's device tensors, as the kernels that graphs capture do; in torch."""

import torch
from torch import Tensor

from reference_server.model_server.attention.backend import AttentionBackend, AttentionNeeds
from reference_server.model_server.attention.staging import on_device
from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions
from reference_server.model_server.attention.torch_backend import TorchPrefill


class TableDecode:
    """One query token a row over every page of its table, masked by its length."""

    name = "tables"
    block_size = 16
    is_capturable = True

    def supports(self, _needs: AttentionNeeds, /) -> bool:
        return True

    def store(self, key_value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        slots = on_device(metadata, cache.device).slots
        cache[slots // cache.shape[3], :, :, slots % cache.shape[3]] = key_value

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        placed = on_device(metadata, cache.device)
        rows, num_heads, head_dim = query.shape
        pages = cache[placed.block_table[:rows].long()]
        keys, values = pages.permute(2, 0, 3, 1, 4, 5).reshape(2, rows, cache.shape[2], -1, head_dim)
        group = num_heads // cache.shape[2]
        scores = torch.einsum("rhgd,rhkd->rhgk", query.view(rows, -1, group, head_dim), keys) * options.scaling
        distance = torch.arange(keys.shape[2], device=query.device) - (placed.seqlen_k[:rows, None] - 1)
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


TABLES = AttentionBackend("tables", TorchPrefill(), TableDecode())
