"""MPT: replaces its attention, which is written inline with ALiBi, by a module that calls the paged layer."""

from typing import Any

import torch
from torch import Tensor, nn

from reference_server.errors import UnsupportedError
from reference_server.model_server.attention.kernel import AttentionOptions
from reference_server.model_server.models.hooks import PagedAttentionModule

BIAS_MAX = 8.0


class MptPagedAttention(PagedAttentionModule):
    """`MptAttention` with the same weights and signature; ignores the position bias and the mask."""

    def __init__(self, inline: Any, total_heads: int) -> None:
        """total_heads: of all ranks, for which there are slopes; `keep_own_heads` keeps those of this rank."""
        super().__init__()
        self.Wqkv: nn.Module = inline.Wqkv
        self.out_proj: nn.Module = inline.out_proj
        self.clip_qkv: float | None = inline.clip_qkv
        self.num_heads: int = inline.n_heads
        self.head_dim: int = inline.head_dim
        self.layer_idx: int = inline.layer_idx
        slopes = alibi_slopes(total_heads).to(inline.out_proj.weight.device)
        self.options = AttentionOptions(inline.softmax_scale, alibi_slopes=slopes)

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        fused = fused.view(-1, 3, self.num_heads, self.head_dim)
        attended = self.paged(fused[:, 0], fused[:, 1:], self.options)
        return self.out_proj(attended.reshape(*hidden_states.shape[:-1], -1)), None


def install(model: Any) -> None:
    """Replace every block's attention; refuses configs that Transformers' class does not compute."""
    attention = model.config.attn_config
    for is_configured, feature in (
        (not attention.alibi, "learned positions"),
        (attention.alibi_bias_max != BIAS_MAX, f"`alibi_bias_max` {attention.alibi_bias_max}"),
        (attention.qk_ln, "norms of queries and keys"),
        (attention.prefix_lm, "a bidirectional prefix"),
        (model.config.logit_scale is not None, "`logit_scale`"),
        (not model.config.no_bias, "biases"),
    ):
        if is_configured:
            raise UnsupportedError(f"MPT with {feature} is not served: Transformers' class does not compute it")
    for block in model.transformer.blocks:
        block.attn = MptPagedAttention(block.attn, model.config.n_heads)
    # The model requires a mask, and passes a four-dimensional one on unchanged.
    model.transformer.register_forward_pre_hook(_add_mask, with_kwargs=True)


def _add_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"attention_mask": torch.zeros((1, 1, 1, 1))}


def alibi_slopes(num_heads: int) -> Tensor:
    """[num_heads] float32; differ from BLOOM's between two powers of two (llm-foundry, `gen_slopes`).

    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-BIAS_MAX * (i + 1) / power) for i in range(power)]
    if power != num_heads:
        slopes = (slopes[1::2] + slopes[::2])[:num_heads]
    return torch.tensor(slopes, dtype=torch.float32)
