"""The linear layer of a quantized weight, and what every form of such a weight offers."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Product(Protocol):
    """`x Wᵀ` for one quantized W, in whatever layout its kernel reads."""

    @property
    def kernel(self) -> str:
        """What multiplies, as `/info` names it."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory of the weight with its scales and zeros."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [rows, inputs]; returns [rows, outputs] of the same type."""
        ...

    def dequantize(self) -> Tensor:
        """The weight that is multiplied with: [outputs, inputs], in the compute type."""
        ...


class QuantizedWeight(Protocol):
    """One weight as a checkpoint holds it, on the CPU."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]"""
        ...

    def product(self, dtype: torch.dtype, device: torch.device) -> Product:
        """The weight in the form that this device multiplies fastest."""
        ...


class QuantizedLinear(nn.Module):
    """Takes the place of a linear, whole or of one rank. Its weight stays without memory until `load`.

    sums: each rank holds some input columns, so that the results are summed before the bias is added.
    """

    def __init__(self, linear: Any, shape: tuple[int, int], *, sums: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.weight = linear.weight
        self.bias = linear.bias
        self.product: Product | None = None
        self.sums = sums

    def load(self, product: Product, dtype: torch.dtype, device: torch.device) -> None:
        """Take the weight; what is left under its name only tells type, device and inputs."""
        self.product = product
        self.weight = nn.Parameter(torch.empty(0, self.in_features, dtype=dtype, device=device), requires_grad=False)

    @property
    def nbytes(self) -> int:
        """Memory of the weight, the bias aside."""
        return 0 if self.product is None else self.product.nbytes

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., inputs]; returns [..., outputs]."""
        return self.rows(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

    def rows(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, inputs]; returns [rows, outputs]."""
        assert self.product is not None, "a linear that was never given its weight"
        result = self.product(hidden)
        if self.sums:
            dist.all_reduce(result)
        return result if self.bias is None else result + self.bias
