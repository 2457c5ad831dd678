"""Modules that hold one rank's part of a weight and combine the results of all ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from reference_server.model_server.distributed import RankGroup


class RowParallelLinear(nn.Module):
    """`y = sum over ranks of x_r W_r + b`. Each rank holds a part of the inputs; the bias is added once."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.adapt: Callable[[Tensor, Tensor], None] | None = None
        """Adds the adapters' updates to this rank's part of the sum."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self._summed(hidden, F.linear(hidden, self.weight))

    def _summed(self, hidden: Tensor, partial: Tensor) -> Tensor:
        if self.adapt is not None:
            self.adapt(hidden, partial)
        dist.all_reduce(partial)
        return partial if self.bias is None else partial + self.bias


class RowParallelConv1D(RowParallelLinear):
    """GPT-2's linear, whose weight is [inputs, outputs]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self._summed(hidden, torch.matmul(hidden, self.weight))


class SummedNorm(nn.Module):
    """A root-mean-square norm over a dimension that the ranks share equally."""

    def __init__(self, norm: Any, group: RankGroup) -> None:
        super().__init__()
        self.weight = norm.weight
        self._epsilon: float = norm.variance_epsilon
        self._world_size = group.world_size

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        # K/V heads on several ranks are counted once per rank, both in the squares and in the size.
        mean = wide.square().mean(-1, keepdim=True)
        dist.all_reduce(mean)
        normed = wide * torch.rsqrt(mean / self._world_size + self._epsilon)
        result: Tensor = self.weight * normed
        return result.to(hidden.dtype)


class GatheredLinear(nn.Module):
    """Each rank computes a part of the outputs and gets all. Parts have equal size; the last may have zero padding."""

    def __init__(self, linear: Any, group: RankGroup) -> None:
        super().__init__()
        self.out_features: int = linear.out_features
        self._world_size = group.world_size
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        part = F.linear(hidden, self.weight, self.bias)
        parts = [torch.empty_like(part) for _ in range(self._world_size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, -1)[..., : self.out_features]


class VocabularyEmbedding(nn.Module):
    """Each rank looks up the ids whose rows it holds; the lookups are summed over the ranks."""

    def __init__(self, embedding: Any, group: RankGroup) -> None:
        super().__init__()
        self._first = group.rank * -(-embedding.num_embeddings // group.world_size)
        self.weight = embedding.weight
        # Gemma scales its embeddings.
        self.embed_scale = getattr(embedding, "embed_scale", None)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: any shape; returns [..., hidden]."""
        rows = input_ids - self._first
        is_foreign = (rows < 0) | (rows >= self.weight.shape[0])
        found = F.embedding(rows.masked_fill(is_foreign, 0), self.weight)
        found = found.masked_fill_(is_foreign[..., None], 0.0)
        dist.all_reduce(found)
        return found if self.embed_scale is None else found * self.embed_scale.to(found.dtype)
