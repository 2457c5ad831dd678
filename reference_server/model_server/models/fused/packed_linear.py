"""A linear whose weight is stored in the layout that its product reads, on a CPU in bfloat16 or float16.

Two products have such a layout. The compiled kernel's is the faster one at every row count (cpu_kernels/panels.h): at
192 x 576 and one row 6 us against 16, at 768 x 2304 and 8 rows 130 against 149. oneDNN's is used without a compiler or
without AVX2. Plain `F.linear` reorders the weight on every call, which costs more than the
product at few rows.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_server.model_server.cpu_kernels.processor import has_bfloat16_product
from reference_server.model_server.memory.weight_memory import placed

# Whether oneDNN has a product of a type on this processor: bfloat16 needs AVX-512, float16 AVX-512 FP16.
ONEDNN_CHECKS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
# oneDNN chooses its layout for this row count; other counts make little difference.
TYPICAL_ROWS = 32
# Outputs side by side in the compiled kernel's layout.
PANEL = 32


@dataclass(frozen=True, slots=True)
class Panels:
    """The operands of the compiled product. packed: as `in_panels`. bias: [outputs]."""

    packed: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int


class PackedLinear(nn.Module):
    """Replaces a linear; does not keep the plain weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.nbytes = weight.nbytes
        self._product: Any
        # The arguments of the product after its input; not registered as parameters.
        self._operands: tuple[Any, ...]
        self.panels: Panels | None = None
        if can_compile(weight):
            self.panels = Panels(in_panels(weight.detach()), bias, *weight.shape)
            self._product = torch.ops.reference_server_cpu.linear.default
            self._operands = (self.panels.packed, bias, weight.shape[0])
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), TYPICAL_ROWS)
            self._product = torch.ops.mkldnn._linear_pointwise.default
            self._operands = (packed, bias, "none", [], "")

    def place_weight(self) -> None:
        """Move the weight to the memory for weights, where it stays as long as the model."""
        if self.panels is not None:
            self.panels = replace(self.panels, packed=placed(self.panels.packed))
            self._operands = (self.panels.packed, *self._operands[1:])

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., inputs]; returns [..., outputs]."""
        if hidden.dim() == 2:
            return self.rows(hidden)
        # A step of unfinished prompts has no logit rows.
        product = self.rows(hidden.reshape(-1, hidden.shape[-1]))
        return product.view(*hidden.shape[:-1], product.shape[-1])

    def rows(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, inputs], contiguous rows; returns [rows, outputs]."""
        product: Tensor = self._product(hidden, *self._operands)
        return product


def panels_of(linear: Any) -> Panels | None:
    """The panels behind `PackedLinear.rows`; None for any other linear."""
    owner = getattr(linear, "__self__", None)
    return owner.panels if isinstance(owner, PackedLinear) else None


def can_pack(weight: Tensor) -> bool:
    """Whether there is a packed product for this device, type, processor and build of torch."""
    return weight.device.type == "cpu" and (can_compile(weight) or _has_onednn_product(weight.dtype))


def can_compile(weight: Tensor) -> bool:
    """Whether the compiled product takes the weight: bfloat16, an even number of inputs, on a processor that has it."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and has_bfloat16_product()


def _has_onednn_product(dtype: torch.dtype) -> bool:
    check = getattr(torch.ops.mkldnn, ONEDNN_CHECKS.get(dtype, ""), None)
    return check is not None and hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(check())


def in_panels(weight: Tensor) -> Tensor:
    """[outputs, inputs] as [outputs / PANEL, inputs / 2, PANEL, 2]; the last panel is padded with zeros."""
    outputs, inputs = weight.shape
    # Padding by nothing copies.
    whole = F.pad(weight, (0, 0, 0, -outputs % PANEL)) if outputs % PANEL else weight
    return whole.view(-1, PANEL, inputs // 2, 2).permute(0, 2, 1, 3).contiguous()


def pack_linears(model: nn.Module, tied: Tensor | None) -> int:
    """Replace every plain linear and Conv1D by a packed one; returns the bytes that this adds.

    tied: a weight that is also the embedding table, which is kept in addition to its packed copy.
    """
    added = 0
    for name, module in list(model.named_modules()):
        weight = _plain_weight(module)
        if weight is None or not can_pack(weight):
            continue
        if tied is not None and weight.data_ptr() == tied.data_ptr():
            added += weight.nbytes
        parent, _, child = name.rpartition(".")
        packed = PackedLinear(weight, module.bias)
        packed.place_weight()
        setattr(model.get_submodule(parent), child, packed)
    return added


def _plain_weight(module: Any) -> Tensor | None:
    """[outputs, inputs] of a linear layer; GPT-2's Conv1D keeps it transposed."""
    if type(module) is nn.Linear:
        return module.weight
    if type(module).__name__ == "Conv1D":
        transposed: Tensor = module.weight.t()
        return transposed
    return None
