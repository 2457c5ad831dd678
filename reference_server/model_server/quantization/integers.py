"""Products of the compiled CPU kernel: rows rounded to int8 in groups of inputs, weights of 4 or 8 bits in panels.

The instructions are those of the processor: AVX-512 VNNI, or AVX2. Without either, and in `float_products`, other
products are chosen, which do not round their inputs.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.cpu_kernels.fakes import INTEGER_LINEARS
from reference_server.model_server.cpu_kernels.processor import has_bfloat16
from reference_server.model_server.quantization import packed_integers
from reference_server.model_server.quantization.packed_integers import PackedIntegers


@dataclass(slots=True)
class _Route:
    is_float: bool = False


_route = _Route()


@contextlib.contextmanager
def float_products() -> Iterator[None]:
    """Weights loaded inside the block get products of float inputs, as on a processor without the instructions."""
    before, _route.is_float = _route.is_float, True
    try:
        yield
    finally:
        _route.is_float = before


def instructions() -> str | None:
    """`vnni` or `avx2`, which the compiled kernel uses; None if there is no kernel."""
    operators = build.kernels()
    name = next((name for name in INTEGER_LINEARS if hasattr(operators, name)), None)
    return None if name is None else name.rpartition("_")[2]


def can_compile(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled kernel is used for this type.

    If float32 was chosen on a processor that computes in bfloat16 by default, exact results are expected: inputs are
    not rounded.
    """
    if device.type != "cpu" or _route.is_float or instructions() is None:
        return False
    return dtype == torch.bfloat16 or (dtype == torch.float32 and not has_bfloat16())


class IntegerProduct:
    """The product of rows that are rounded to int8 and a packed weight.

    order: [inputs], int64, the input at each stored place; None if they are in order.
    """

    def __init__(self, weight: PackedIntegers, dtype: torch.dtype, order: Tensor | None = None) -> None:
        self.weight = weight
        self._is_placed = False
        self.order = order
        self.kernel = f"int{weight.bits}-{instructions()}"
        self.dtype = dtype
        operator = getattr(torch.ops.reference_server_cpu, f"integer_linear_{instructions()}")
        self._product: Any = operator.default
        groups, quads = weight.codes.shape[1:3]
        self._sizes = (weight.shape[0], groups, 4 * quads, weight.bits)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weight.tensors) + (0 if self.order is None else self.order.nbytes)

    def place_weight(self) -> None:
        """Move the weight to the memory for weights, where it stays as long as the model."""
        if not self._is_placed:
            self.weight = self.weight.in_weight_memory()
            self._is_placed = True

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [rows, inputs]; returns [rows, outputs]."""
        return self.with_bias(rows, None)

    def with_bias(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """rows: [rows, inputs]; bias: [outputs]; returns [rows, outputs]."""
        if self.order is not None:
            rows = rows[:, self.order]
        elif rows.stride(1) != 1:
            rows = rows.contiguous()
        weight = self.weight
        result: Tensor = self._product(
            *(rows, weight.codes, weight.multipliers, weight.scales, weight.zeros, bias), *self._sizes
        )
        return result

    def dequantize(self) -> Tensor:
        """[outputs, inputs]"""
        stored = self.weight.dequantize().to(self.dtype)
        return stored if self.order is None else torch.empty_like(stored).index_copy_(1, self.order, stored)

    def part(self, first: int, outputs: int) -> "IntegerProduct":
        """The product of some outputs, in the same memory. first: a multiple of PANEL."""
        return IntegerProduct(self.weight.part(first, outputs), self.dtype, self.order)


def stack(products: Sequence[IntegerProduct]) -> IntegerProduct | None:
    """One product with the outputs of all, in order; None if they have no common layout."""
    orders = [product.order for product in products if product.order is not None]
    if orders and not (len(orders) == len(products) and all(torch.equal(each, orders[0]) for each in orders)):
        return None
    whole = packed_integers.stack([product.weight for product in products])
    return None if whole is None else IntegerProduct(whole, products[0].dtype, products[0].order)
