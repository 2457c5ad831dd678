"""Tensor parallelism: a loaded model's linears cut to one rank's share, by the plan that Transformers has for it.

The plan is data (module pattern -> style) and is taken as it is; the linears are our own, so that the cut weights stay
plain tensors and nothing beside torch is needed.

    colwise                  this rank's output rows; the result stays cut
    rowwise                  this rank's input columns; partial results are summed over the ranks
    colwise_gather_output    this rank's output rows; the result is put together again
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from reference_server.errors import UnsupportedError
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import transformers_compat


class RowParallelLinear(nn.Module):
    """`y = sum over ranks of x_r W_r + b`: each rank holds some input columns, the bias is added once."""

    def __init__(self, linear: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.weight = _cut(linear.weight, 1, group)
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        partial = F.linear(hidden, self.weight)
        dist.all_reduce(partial)
        return partial if self.bias is None else partial + self.bias


class GatheredLinear(nn.Module):
    """Each rank computes some outputs, every rank gets all. Shares are equal; the last may be padded with zeros."""

    def __init__(self, linear: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.out_features: int = linear.out_features
        self._world_size = group.world_size
        share = -(-linear.out_features // group.world_size)
        own = linear.weight.detach()[group.rank * share : (group.rank + 1) * share]
        self.weight = nn.Parameter(F.pad(own, (0, 0, 0, share - len(own))), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        own = F.linear(hidden, self.weight)
        parts = [torch.empty_like(own) for _ in range(self._world_size)]
        dist.all_gather(parts, own)
        return torch.cat(parts, -1)[..., : self.out_features]


def shard(model: Any, group: RankGroup) -> None:
    """Cut `model` in place. Raises UnsupportedError, naming what is in the way, if its plan cannot be kept."""
    plan = transformers_compat.tensor_parallel_plan(model)
    if not plan:
        raise UnsupportedError(f"sharded {type(model).__name__} is not supported: Transformers has no plan for it")
    _check_heads(model.config, group.world_size)
    for name, module in list(model.named_modules()):
        style = _style(plan, name)
        if style is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _sharded(module, style, name, group))


def _sharded(module: Any, style: str, name: str, group: RankGroup) -> nn.Module:
    kind = type(module)
    if kind is not nn.Linear:
        raise UnsupportedError(f"{name} is a {kind.__name__}: only plain linears are sharded")
    match style:
        case "colwise":
            module.weight = _cut(module.weight, 0, group)
            if module.bias is not None:
                module.bias = _cut(module.bias, 0, group)
            module.out_features = len(module.weight)
            cut: nn.Module = module
            return cut
        case "rowwise":
            return RowParallelLinear(module, group)
        case "colwise_gather_output" | "colwise_rep" if module.bias is None:
            return GatheredLinear(module, group)
    raise UnsupportedError(f"{name}: the tensor-parallel style {style!r} is not supported")


def _style(plan: Mapping[str, str], name: str) -> str | None:
    """The style of a module: patterns have `*` for a layer's number.

    >>> _style({"layers.*.mlp": "colwise"}, "layers.12.mlp")
    'colwise'
    """
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _check_heads(config: Any, world_size: int) -> None:
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if heads is not None and heads % world_size:
            raise UnsupportedError(f"the model's {field} is {heads}, which {world_size} shards cannot divide")


def _cut(tensor: Tensor, dim: int, group: RankGroup) -> nn.Parameter:
    """This rank's equal share along `dim`, in memory of its own."""
    size = tensor.shape[dim]
    if size % group.world_size:
        raise UnsupportedError(f"a weight of {tuple(tensor.shape)} cannot be divided over {group.world_size} shards")
    share = size // group.world_size
    return nn.Parameter(tensor.detach().narrow(dim, group.rank * share, share).clone(), requires_grad=False)
