"""A linear whose weight lies in the layout that oneDNN multiplies from, on a CPU in bfloat16 or float16.

Plain `F.linear` brings the weight into that layout on every call, which at few rows costs more than the product:
2-3 times at 1 to 16 rows, nothing at 128 and more. The results are equal bit for bit.
"""

from typing import Any

import torch
from torch import Tensor, nn

PACKED_DTYPES = (torch.bfloat16, torch.float16)
# The row count that the layout is chosen for; it makes little difference (benchmarks/engine.py).
TYPICAL_ROWS = 32


class PackedLinear(nn.Module):
    """Takes the place of a linear; the plain weight is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.nbytes = weight.nbytes
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), TYPICAL_ROWS)
        self._bias = bias
        self._product: Any = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self._product(hidden, self._weight, self._bias, "none", [], "")
        return product


def can_pack(weight: Tensor) -> bool:
    """Whether this device, type and build of torch have the packed product."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in PACKED_DTYPES
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack_linears(model: nn.Module, tied: Tensor | None) -> int:
    """Replace every plain linear and Conv1D by a packed one; the bytes that this adds.

    tied: a weight that is also an embedding table, which has to stay as it is beside its packed copy.
    """
    added = 0
    for name, module in list(model.named_modules()):
        weight = _plain_weight(module)
        if weight is None or not can_pack(weight):
            continue
        if tied is not None and weight.data_ptr() == tied.data_ptr():
            added += weight.nbytes
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear(weight, module.bias))
    return added


def _plain_weight(module: Any) -> Tensor | None:
    """[outputs, inputs] of a linear layer; GPT-2's Conv1D keeps it transposed."""
    if type(module) is nn.Linear:
        return module.weight
    if type(module).__name__ == "Conv1D":
        transposed: Tensor = module.weight.t()
        return transposed
    return None
