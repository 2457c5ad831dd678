"""Replaces the linears of a model by fused ones: stacked, reordered, packed.

Quantized linears of the compiled kernels are stacked too. Others keep their weights: their results are stacked and
reordered instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reference_server.model_server.models.fused.packed_linear import PackedLinear, can_pack
from reference_server.model_server.models.fused.walk import Linear
from reference_server.model_server.models.tensor_parallel.rank_modules import (
    GatheredLinear,
    RowParallelConv1D,
    RowParallelLinear,
)
from reference_server.model_server.quantization.linear import QuantizedLinear, rows_of
from reference_server.model_server.quantization.linear import stacked as stacked_quantized
from reference_server.model_server.quantization.packed_product import PackedProductLinear

CONV1D = ("Conv1D", RowParallelConv1D.__name__)
"""Classes whose weight is [inputs, outputs]."""


def is_linear(module: Any) -> bool:
    """Whether it is a linear, whole on this rank or cut by its outputs."""
    if isinstance(module, QuantizedLinear):
        return not module.sums
    return type(module) is nn.Linear or type(module).__name__ == CONV1D[0]


def is_output(module: Any) -> bool:
    """Whether it is a linear, possibly cut by its inputs, with results summed over the ranks."""
    return is_linear(module) or type(module) in (RowParallelLinear, RowParallelConv1D, QuantizedLinear)


def is_head(module: Any) -> bool:
    """Whether it is a linear, possibly cut by its outputs, which are gathered from the ranks."""
    return type(module) in (nn.Linear, GatheredLinear, QuantizedLinear)


def can_stack(linears: Sequence[Any]) -> bool:
    """Whether `stacked` supports them: all have the same quantization, and all or none have a bias."""
    kinds = {(isinstance(linear, QuantizedLinear), linear.bias is None) for linear in linears}
    return all(is_linear(linear) for linear in linears) and len(kinds) == 1


def shape_of(module: Any) -> tuple[int, int]:
    """Outputs and inputs on this rank."""
    if isinstance(module, QuantizedLinear):
        return module.out_features, module.in_features
    outputs, inputs = weight_of(module).shape
    return outputs, inputs


def weight_of(module: Any) -> Tensor:
    """[outputs, inputs]."""
    weight: Tensor = module.weight.detach()
    return weight.t() if type(module).__name__ in CONV1D else weight


def stacked(*linears: Any, keep: bool = False) -> Any:
    """One linear with the outputs of all, in order. The modules lose their weights unless `keep`."""
    if len(linears) == 1:
        return linears[0]
    if isinstance(linears[0], QuantizedLinear):
        return stacked_quantized(linears, keep)
    bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    whole = _plain(torch.cat([weight_of(linear) for linear in linears]), bias)
    for linear in linears if not keep else ():
        _empty(linear)
    return whole


def split_heads(linear: Any, heads: int, keep: bool = False) -> Any:
    """A linear that gives query, key and value head by head, reordered: all queries, then all keys, then all values."""
    if isinstance(linear, QuantizedLinear):
        return lambda hidden: linear.rows(hidden).view(len(hidden), heads, 3, -1).transpose(1, 2).flatten(1)

    bias = None if linear.bias is None else heads_in_order(heads, linear.bias.detach())
    ordered = _plain(heads_in_order(heads, weight_of(linear)), bias)
    if not keep:
        _empty(linear)
    return ordered


def heads_in_order(heads: int, rows: Tensor) -> Tensor:
    """Rows of query, key and value head by head -> all queries, then all keys, then all values."""
    return rows.view(heads, 3, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def take_weights(module: Any, keep: bool = False) -> Linear:
    """The linear in its device's fastest form. The module loses its weight unless `keep`."""
    if isinstance(module, QuantizedLinear):
        return rows_of(module)
    if not is_linear(module) or not can_pack(module.weight):
        plain: Linear = module
        return plain
    packed = PackedLinear(weight_of(module), module.bias)
    if not keep:
        _empty(module)
    # The method instead of the module, because a module's call costs as much as a small product.
    return packed.rows


def place_weight(linear: Linear) -> None:
    """Move the weight of a linear in its fastest form to the memory for weights."""
    match getattr(linear, "__self__", None):
        case PackedLinear() as packed:
            packed.place_weight()
        case PackedProductLinear(product=product):
            product.place_weight()


def _plain(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _empty(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
