"""The linear layer with a quantized weight, and the protocols of such a weight."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference_server.model_server.quantization.packed_product import PackedProduct, PackedProductLinear, stack


class Product(Protocol):
    """`x Wᵀ` for one quantized W, in the layout of its kernel."""

    @property
    def kernel(self) -> str:
        """Name of the kernel, as shown by `/info`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weight with its scales and zeros."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [rows, inputs]; returns [rows, outputs] of the same type."""
        ...

    def dequantize(self) -> Tensor:
        """The dequantized weight: [outputs, inputs], in the compute type."""
        ...


class QuantizedWeight(Protocol):
    """One weight as stored in a checkpoint, on the CPU."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]"""
        ...

    def product(self, dtype: torch.dtype, device: torch.device) -> Product:
        """The weight in the fastest form for this device."""
        ...


class QuantizedLinear(nn.Module):
    """Replaces a linear, or one rank's part of it. Its weight has no memory before `load`.

    sums: each rank holds a part of the inputs; results are summed over the ranks before the bias is added.
    """

    def __init__(self, linear: Any, shape: tuple[int, int], *, sums: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.weight = linear.weight
        self.bias = linear.bias
        self.product: Product | None = None
        self.sums = sums
        self.adapt: Callable[[Tensor, Tensor], None] | None = None
        """Adds the adapters' updates before the sum."""

    def load(self, product: Product, dtype: torch.dtype, device: torch.device) -> None:
        """Set the weight. The parameter `weight` stays empty; it only carries dtype, device and number of inputs."""
        self.product = product
        self.weight = nn.Parameter(torch.empty(0, self.in_features, dtype=dtype, device=device), requires_grad=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, without the bias."""
        return 0 if self.product is None else self.product.nbytes

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., inputs]; returns [..., outputs]."""
        return self.rows(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

    def rows(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, inputs]; returns [rows, outputs]."""
        assert self.product is not None, "the linear has no weight: call `load` first"
        if isinstance(self.product, PackedProduct) and not self.sums:
            return self.product.with_bias(hidden, self.bias)
        result = self.product(hidden)
        if self.adapt is not None:
            self.adapt(hidden, result)
        if self.sums:
            dist.all_reduce(result)
        return result if self.bias is None else result + self.bias


def rows_of(linear: QuantizedLinear) -> Callable[[Tensor], Tensor]:
    """The linear's `rows`, without its module if the compiled kernel has it."""
    if isinstance(linear.product, PackedProduct) and not linear.sums:
        return PackedProductLinear(linear.product, linear.bias).rows
    return linear.rows


def stacked(linears: Sequence[QuantizedLinear], keep: bool) -> Callable[[Tensor], Tensor]:
    """Rows to the results of all linears side by side: one product, if the kernel has one for their layouts.

    The linears then share its memory, unless `keep`.
    """
    whole = stack([linear.product for linear in linears])
    if whole is None:
        return lambda hidden: torch.cat([linear.rows(hidden) for linear in linears], 1)
    bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    if not keep:
        # Before its parts, which are views of its memory.
        whole.place_weight()
    first = 0
    for linear in linears if not keep else ():
        linear.product = whole.part(first, linear.out_features)
        first += linear.out_features
    return PackedProductLinear(whole, bias).rows
