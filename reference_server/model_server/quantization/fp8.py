"""Eight-bit floating-point weights (e4m3) with one scale for the weight, for each output or for each block.

On NVIDIA GPUs of capability 8.9 and higher, inputs are rounded to e4m3 too, with one scale per row, and tensor cores
multiply. On a CPU with bfloat16 products the compiled kernel widens the weight in registers. Elsewhere the weight is
converted to the compute type for each product.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.quantization import packed_float8
from reference_server.model_server.quantization.packed_float8 import PackedFloat8Product

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# Difference of the exponent biases: e4m3 has 7; bfloat16 and float32 have 127.
BIAS_SCALE = 2.0**120


@dataclass(frozen=True, slots=True)
class ScaledFloats:
    """values: [outputs, inputs], e4m3. scales: float32, [1, 1], [outputs, 1], or one per block."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]"""
        return (self.values.float() * _spread(self.scales, self.shape)).to(dtype)

    def product(self, dtype: torch.dtype, device: torch.device) -> "Float8Product | PackedFloat8Product":
        """The weight in the fastest form for this device."""
        values, scales = self.values.to(device), self.scales.to(device).float()
        blocks = scales.shape[1]
        group = values.shape[1] if blocks == 1 else block_size(values.shape[1], blocks)
        if packed_float8.can_compile(values, group, dtype):
            by_output = _spread_along(0, scales, len(values)).expand(len(values), blocks)
            return PackedFloat8Product(packed_float8.pack(values, by_output, group))
        return Float8Product(values, scales, dtype)


def round_to_float8(weight: Tensor) -> "Float8Product | PackedFloat8Product":
    """Round a weight [outputs, inputs] to the nearest e4m3 values, with one scale per output."""
    largest = weight.abs().amax(1, keepdim=True).float()
    scales = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return ScaledFloats(_rounded(weight, scales), scales).product(weight.dtype, weight.device)


class Float8Product:
    """The product of rows in the compute type and an e4m3 weight."""

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self._values = values.contiguous()
        self._scales = scales.float()
        self._dtype = dtype
        self.kernel = "scaled_mm" if _has_tensor_cores(values, scales, dtype) else "dequantize"

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [rows, inputs]; returns [rows, outputs]."""
        if self.kernel == "scaled_mm":
            return self._scaled_mm(rows)
        if _is_per_output(self._scales, len(self._values)):
            result = F.linear(rows, widened(self._values, self._dtype))
            return result.mul_(self._scales[:, 0].to(self._dtype))
        return F.linear(rows, self.dequantize())

    def _scaled_mm(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(1, keepdim=True).float()
        row_scales = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        column_scales = self._scales.expand(len(self._values), 1).t().contiguous()
        result: Tensor = torch._scaled_mm(
            _rounded(rows, row_scales), self._values.t(), row_scales, column_scales, out_dtype=self._dtype
        )
        return result

    def dequantize(self) -> Tensor:
        """[outputs, inputs]"""
        scales = _spread(self._scales, (self._values.shape[0], self._values.shape[1]))
        return widened(self._values, self._dtype) * scales.to(self._dtype)


def widened(values: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 values in a wider type, exactly. torch's own cast takes five times as long on a CPU.

    The bits are shifted to the fields of the wider type; a multiplication then corrects the exponent's bias.
    """
    if values.device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return values.to(dtype)
    signed = values.view(torch.int8)
    if dtype == torch.bfloat16:
        moved = signed.to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x7810)
    else:
        moved = signed.to(torch.int32).bitwise_left_shift_(20).bitwise_and_(-0x78100000)
    return moved.view(dtype).mul_(BIAS_SCALE)


def _rounded(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float() / scales).clamp(-LARGEST, LARGEST).to(FLOAT8)


def _spread(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Expand block scales so that they broadcast to [outputs, inputs]. The last blocks may be shorter."""
    for dim in (0, 1):
        scales = _spread_along(dim, scales, shape[dim])
    return scales


def _spread_along(dim: int, scales: Tensor, size: int) -> Tensor:
    blocks = scales.shape[dim]
    if blocks in (1, size):
        return scales
    return scales.repeat_interleave(block_size(size, blocks), dim).narrow(dim, 0, size)


def block_size(size: int, blocks: int) -> int:
    """The size of a dimension's blocks: a power of two, usually 128."""
    fitting = [1 << power for power in range(15) if -(-size // (1 << power)) == blocks]
    return 128 if 128 in fitting else fitting[-1]


def _is_per_output(scales: Tensor, outputs: int) -> bool:
    return scales.shape[1] == 1 and scales.shape[0] in (1, outputs)


def _has_tensor_cores(values: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
    return (
        values.device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(values.device) >= (8, 9)
        and dtype == torch.bfloat16
        and _is_per_output(scales, len(values))
        and values.shape[0] % 16 == 0
        and values.shape[1] % 16 == 0
    )
