"""Eight-bit integer weights with one scale per output (`eetq`, W8 checkpoints).

The compiled CPU kernel rounds inputs to int8 too; the other products do not.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.quantization.integers import IntegerProduct, can_compile
from reference_server.model_server.quantization.packed_integers import pack_outputs

PACKED_ROWS = {"cpu": 4, "cuda": 16}
"""Largest number of rows for which torch's int8 product is faster than dequantizing. CPU, 2304 x 768, 8 rows: 598 us
against 483."""


@dataclass(frozen=True, slots=True)
class ScaledIntegers:
    """codes: [outputs, inputs], int8. scales: [outputs], floating point."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]"""
        return (self.codes * self.scales.float()[:, None]).to(dtype)

    def product(self, dtype: torch.dtype, device: torch.device) -> "Int8Product | IntegerProduct":
        """The weight in the fastest form for this device."""
        if can_compile(dtype, device):
            return IntegerProduct(pack_outputs(self.codes, self.scales), dtype)
        return Int8Product(self.codes.to(device), self.scales.to(device, dtype))


def round_to_int8(weight: Tensor) -> "Int8Product | IntegerProduct":
    """Round a weight [outputs, inputs] to the nearest of 255 steps, with one scale per output."""
    largest = weight.abs().amax(1).float().clamp(min=torch.finfo(torch.float32).tiny)
    scales = (largest / 127).to(weight.dtype)
    scales = scales.clamp(min=torch.finfo(weight.dtype).tiny)
    codes = (weight.float() / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return ScaledIntegers(codes, scales).product(weight.dtype, weight.device)


class Int8Product:
    """Uses torch's int8 product for few rows, and dequantizes the weight for many."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self._codes = codes.contiguous()
        self._scales = scales
        # In float32, the int8 product is slower than dequantizing for any number of rows.
        self._packed_rows = PACKED_ROWS.get(codes.device.type, 0) if scales.dtype == torch.bfloat16 else 0
        self.kernel = "int8pack" if self._packed_rows else "dequantize"

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [rows, inputs]; returns [rows, outputs]."""
        if len(rows) <= self._packed_rows:
            result: Tensor = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self._codes, self._scales)
            return result
        return F.linear(rows, self._codes.to(rows.dtype)).mul_(self._scales)

    def dequantize(self) -> Tensor:
        """[outputs, inputs]"""
        return self._codes.to(self._scales.dtype) * self._scales[:, None]
