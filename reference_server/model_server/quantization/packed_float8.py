"""Products of the compiled CPU kernel with e4m3 weights (cpu_kernels/float8_linear.cpp).

The kernel reads one byte per weight and widens it to bfloat16 in registers; the inputs are not rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.memory.weight_memory import placed

PANEL = 32


@dataclass(frozen=True, slots=True)
class PackedFloat8:
    """A weight in the layout of the kernel.

    codes: [panels, inputs / 2, 2 * PANEL], uint8. factors: [panels, groups, PANEL], float32, the scale of each output
    in each group of `group` inputs.
    """

    codes: Tensor
    factors: Tensor
    shape: tuple[int, int]
    group: int


class PackedFloat8Product:
    """The product of bfloat16 rows and a packed e4m3 weight."""

    kernel = "fp8-bf16"

    def __init__(self, weight: PackedFloat8) -> None:
        self.weight = weight
        self._is_placed = False
        self._product = torch.ops.reference_server_cpu.float8_linear.default

    @property
    def nbytes(self) -> int:
        return self.weight.codes.nbytes + self.weight.factors.nbytes

    def place_weight(self) -> None:
        """Move the weight to the memory for weights, where it stays as long as the model."""
        if not self._is_placed:
            weight = self.weight
            self.weight = replace(weight, codes=placed(weight.codes), factors=placed(weight.factors))
            self._is_placed = True

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [rows, inputs]; returns [rows, outputs]."""
        return self.with_bias(rows, None)

    def with_bias(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """rows: [rows, inputs]; bias: [outputs]; returns [rows, outputs]."""
        weight = self.weight
        whole = rows if rows.stride(1) == 1 else rows.contiguous()
        result: Tensor = self._product(whole, weight.codes, weight.factors, bias, weight.shape[0], weight.group)
        return result

    def dequantize(self) -> Tensor:
        """[outputs, inputs], bfloat16."""
        outputs, inputs = self.weight.shape
        values = _from_panels(self.weight.codes).view(torch.float8_e4m3fn).float()
        factors = self.weight.factors.transpose(1, 2).flatten(0, 1)
        spread = factors.repeat_interleave(self.weight.group, 1)[:, :inputs]
        return (values * spread)[:outputs].to(torch.bfloat16)

    def part(self, first: int, outputs: int) -> "PackedFloat8Product":
        """The product of some outputs, in the same memory. first: a multiple of PANEL."""
        panels, weight = slice(first // PANEL, -(-(first + outputs) // PANEL)), self.weight
        shape = (outputs, weight.shape[1])
        return PackedFloat8Product(
            replace(weight, codes=weight.codes[panels], factors=weight.factors[panels], shape=shape)
        )


def can_compile(values: Tensor, group: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes a weight [outputs, inputs] with scales for groups of `group` inputs."""
    if values.device.type != "cpu" or dtype != torch.bfloat16 or values.shape[1] % 2 or group % 2:
        return False
    return hasattr(build.kernels(), "float8_linear")


def pack(values: Tensor, factors: Tensor, group: int) -> PackedFloat8:
    """values: [outputs, inputs], e4m3. factors: [outputs, groups], float32."""
    outputs, inputs = values.shape
    padding = (0, 0, 0, -outputs % PANEL)
    in_panels = F.pad(factors, padding).view(-1, PANEL, factors.shape[1]).transpose(1, 2).contiguous()
    return PackedFloat8(_panels(F.pad(values.view(torch.uint8), padding)), in_panels, (outputs, inputs), group)


def stack(products: Sequence[PackedFloat8Product]) -> PackedFloat8Product | None:
    """One product with the outputs of all, in order; None if their layouts differ or a panel is not full."""
    weights = [product.weight for product in products]
    layouts = {(each.shape[1], each.group) for each in weights}
    if len(layouts) > 1 or any(each.shape[0] % PANEL for each in weights):
        return None
    return PackedFloat8Product(
        replace(
            weights[0],
            codes=torch.cat([each.codes for each in weights]),
            factors=torch.cat([each.factors for each in weights]),
            shape=(sum(each.shape[0] for each in weights), weights[0].shape[1]),
        )
    )


def _panels(codes: Tensor) -> Tensor:
    """[outputs, inputs] in the layout of the kernel: of each pair of inputs, 4 lanes of 8 bytes of both halves."""
    pairs = codes.view(-1, PANEL, codes.shape[1] // 2, 2).transpose(1, 2)  # [panels, pairs, PANEL, 2]
    return pairs.reshape(*pairs.shape[:2], 2, 4, 8).transpose(2, 3).reshape(*pairs.shape[:2], 2 * PANEL)


def _from_panels(codes: Tensor) -> Tensor:
    """The inverse of `_panels`."""
    halves = codes.view(*codes.shape[:2], 4, 2, 8).transpose(2, 3)
    return halves.reshape(*codes.shape[:2], PANEL, 2).transpose(1, 2).reshape(-1, 2 * codes.shape[1])
