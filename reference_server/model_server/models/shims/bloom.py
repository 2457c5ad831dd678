"""BLOOM: replaces its attention, which is written inline with ALiBi, by a module that calls the paged layer."""

from typing import Any

import torch
from torch import Tensor, nn

from reference_server.model_server.attention.kernel import AttentionOptions
from reference_server.model_server.models.hooks import PagedAttentionModule


class BloomPagedAttention(PagedAttentionModule):
    """`BloomAttention` with the same weights and signature; ignores the alibi tensor and the mask."""

    def __init__(self, inline: Any, total_heads: int) -> None:
        """total_heads: of all ranks, for which there are slopes; `keep_own_heads` keeps those of this rank."""
        super().__init__()
        self.query_key_value: nn.Module = inline.query_key_value
        self.dense: nn.Module = inline.dense
        self.num_heads: int = inline.num_heads
        self.head_dim: int = inline.head_dim
        self.layer_idx: int = inline.layer_idx
        slopes = alibi_slopes(total_heads).to(inline.dense.weight.device)
        self.options = AttentionOptions(scaling=self.head_dim**-0.5, alibi_slopes=slopes)

    def forward(self, hidden_states: Tensor, residual: Tensor, **_: object) -> tuple[Tensor, None]:
        # The fused projection is interleaved per head: [tokens, heads, (q, k, v), head_dim].
        fused = self.query_key_value(hidden_states).view(-1, self.num_heads, 3, self.head_dim)
        attended = self.paged(fused[:, :, 0], fused[:, :, 1:].transpose(1, 2), self.options)
        return residual + self.dense(attended.reshape(*hidden_states.shape[:-1], -1)), None


def install(model: Any) -> None:
    """Replace every block's attention."""
    for block in model.transformer.h:
        block.self_attention = BloomPagedAttention(block.self_attention, model.config.num_attention_heads)


def alibi_slopes(num_heads: int) -> Tensor:
    """[num_heads] float32: powers of a base that depends on the head count (ALiBi, Press et al., section 3).

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)
