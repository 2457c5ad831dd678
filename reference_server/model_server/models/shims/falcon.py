"""Falcon: replaces its attention, written inline with rotary positions or ALiBi, by a module that calls ours."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from reference_server.model_server.attention.kernel import AttentionOptions
from reference_server.model_server.models.hooks import PagedAttentionModule
from reference_server.model_server.models.shims.bloom import alibi_slopes


class FalconPagedAttention(PagedAttentionModule):
    """`FalconAttention` with the same weights and signature; ignores the alibi tensor and the mask."""

    def __init__(self, inline: Any, total_heads: int, use_alibi: bool) -> None:
        """total_heads: of all ranks, for which there are slopes; `keep_own_heads` keeps those of this rank."""
        super().__init__()
        self.query_key_value: nn.Module = inline.query_key_value
        self.dense: nn.Module = inline.dense
        self.num_heads: int = inline.num_heads
        self.num_kv_heads: int = inline.num_kv_heads
        self.head_dim: int = inline.head_dim
        self.layer_idx: int = inline.layer_idx
        self.options = AttentionOptions(scaling=self.head_dim**-0.5)
        if use_alibi:
            # Transformers rounds the slopes to bfloat16 and scales the bias with the scores. It also rounds each bias,
            # which makes distances past 256 tokens inexact; that is not reproduced.
            slopes = alibi_slopes(total_heads).bfloat16().float() * self.options.scaling
            self.options = replace(self.options, alibi_slopes=slopes.to(inline.dense.weight.device))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: object,
    ) -> tuple[Tensor, None]:
        # Every layout consists of groups: a K/V head's queries, then its key, then its value.
        group = self.num_heads // self.num_kv_heads
        fused = self.query_key_value(hidden_states).view(-1, self.num_kv_heads, group + 2, self.head_dim)
        query = fused[:, :, :-2].reshape(-1, self.num_heads, self.head_dim)
        key, value = fused[:, :, -2], fused[:, :, -1]
        if self.options.alibi_slopes is None:
            cos, sin = (part[0, :, None] for part in position_embeddings)
            query, key = query * cos + _rotated_half(query) * sin, key * cos + _rotated_half(key) * sin
        attended = self.paged(query, torch.stack((key, value), 1), self.options)
        return self.dense(attended.reshape(*hidden_states.shape[:-1], -1)), None


def install(model: Any) -> None:
    """Replace every block's attention."""
    config = model.config
    for block in model.transformer.h:
        block.self_attention = FalconPagedAttention(block.self_attention, config.num_attention_heads, config.alibi)


def _rotated_half(heads: Tensor) -> Tensor:
    """The halves of each head swapped, the second one negated."""
    first, second = heads.chunk(2, -1)
    return torch.cat((-second, first), -1)
