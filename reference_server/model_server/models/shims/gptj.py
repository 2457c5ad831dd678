"""GPT-J: replaces only the product over the keys in its inline attention; projections and rotary stay."""

from functools import partial
from typing import Any

from torch import Tensor

from reference_server.model_server.models.hooks import attention_forward


def install(model: Any) -> None:
    """Give every block's attention module the paged product."""
    for block in model.transformer.h:
        block.attn._attn = partial(_paged_product, block.attn)


def _paged_product(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """`GPTJAttention._attn`: [1, num_heads, tokens, head_dim] in and out."""
    attended, _ = attention_forward(attention, query, key, value, attention_mask)
    return attended.transpose(1, 2), None
