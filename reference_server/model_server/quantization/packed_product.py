"""Products with a weight that is packed for a compiled CPU kernel: they add the bias, and can be stacked."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from reference_server.model_server.quantization import integers, packed_float8
from reference_server.model_server.quantization.integers import IntegerProduct
from reference_server.model_server.quantization.packed_float8 import PackedFloat8Product

PackedProduct = IntegerProduct | PackedFloat8Product


@dataclass(frozen=True, slots=True)
class PackedProductLinear:
    """A product with its bias, [outputs] or None."""

    product: PackedProduct
    bias: Tensor | None

    def rows(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, inputs]; returns [rows, outputs]."""
        return self.product.with_bias(hidden, self.bias)


def stack(products: Sequence[object]) -> PackedProduct | None:
    """One product with the outputs of all, in order; None if they have no common layout."""
    whole = [product for product in products if isinstance(product, IntegerProduct)]
    if len(whole) == len(products):
        return integers.stack(whole)
    floats = [product for product in products if isinstance(product, PackedFloat8Product)]
    return packed_float8.stack(floats) if len(floats) == len(products) else None
