"""The attention heads of one rank, and their places in the weights of the whole model.

With fewer K/V heads than ranks, each rank holds the K/V head that its queries read.
"""

import copy
from dataclasses import dataclass
from typing import Any

from reference_server.errors import UnsupportedError
from reference_server.model_server.distributed import RankGroup


@dataclass(frozen=True, slots=True)
class RankHeads:
    """Attention heads of the model and of one rank: query heads `[first, first + own)` and the K/V heads they read."""

    total: int
    total_kv: int
    group: RankGroup

    @property
    def own(self) -> int:
        return self.total // self.group.world_size

    @property
    def own_kv(self) -> int:
        return max(1, self.total_kv // self.group.world_size)

    @property
    def first(self) -> int:
        return self.group.rank * self.own

    @property
    def first_kv(self) -> int:
        return self.group.rank * self.total_kv // self.group.world_size

    def queries(self, head_size: int, offset: int = 0) -> tuple[int, int]:
        return offset + self.first * head_size, offset + (self.first + self.own) * head_size

    def keys(self, head_size: int, offset: int = 0) -> tuple[int, int]:
        return offset + self.first_kv * head_size, offset + (self.first_kv + self.own_kv) * head_size

    def groups(self, head_size: int) -> tuple[tuple[int, int], ...]:
        """Of a weight of groups: the queries of a K/V head, its key, its value."""
        queries = self.total // self.total_kv
        width = (queries + 2) * head_size
        first = self.first_kv * width
        if self.own >= queries:
            return ((first, first + self.own_kv * width),)
        start = first + (self.first - self.first_kv * queries) * head_size
        return (start, start + self.own * head_size), (first + queries * head_size, first + width)


def heads_of(config: Any, group: RankGroup) -> RankHeads:
    """The heads of one rank. Raises UnsupportedError if the heads cannot be divided over the ranks."""
    total = config.num_attention_heads
    total_kv = _num_kv_heads(config) or total
    ranks = group.world_size
    if total % ranks or (total_kv % ranks and ranks % total_kv):
        raise UnsupportedError(
            f"the model has num_attention_heads {total} and num_key_value_heads {total_kv}, which cannot be divided "
            f"over {ranks} shards"
        )
    return RankHeads(total, total_kv, group)


def _num_kv_heads(config: Any) -> int | None:
    """None for a model with as many K/V heads as query heads."""
    match config.model_type:
        case "gpt_bigcode":
            return 1 if config.multi_query else None
        case "falcon" if config.multi_query and not config.new_decoder_architecture:
            return 1
        case "falcon":
            return int(config.num_kv_heads)
        case "dbrx":
            return int(config.attn_config.kv_n_heads)
        case _:
            return getattr(config, "num_key_value_heads", None)


def set_own_heads(attention: Any, heads: RankHeads) -> None:
    """Set the head counts of an attention module to those of this rank."""
    own = {
        **dict.fromkeys(("num_heads", "n_heads", "num_attention_heads"), heads.own),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_heads"), heads.own_kv),
        "num_key_value_groups": heads.own // heads.own_kv,
    }
    # The sizes of the parts of a fused projection's result.
    head_dim = getattr(attention, "head_dim", None)
    if isinstance(head_dim, int) and hasattr(attention, "c_attn"):
        own |= dict.fromkeys(("split_size", "embed_dim"), heads.own * head_dim) | {"kv_dim": heads.own_kv * head_dim}
    if isinstance(head_dim, int) and hasattr(attention, "Wqkv"):
        own |= {"hidden_size": heads.own * head_dim}
    for name, value in own.items():
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, value)
    if hasattr(attention, "qkv_proj"):
        # Phi-3 reads the number of query heads from its config.
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads = heads.own
