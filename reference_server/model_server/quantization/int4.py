"""Integer weights with a scale and a zero per group of inputs, as in GPTQ, AWQ and compressed-tensors checkpoints.

`w = (code - zero) * scale`. The compiled CPU kernel is used if it takes bits and groups, then torch's packed int4
product if it supports dtype and group size. Otherwise the weight stays packed and is dequantized for each product.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.quantization.integers import IntegerProduct, can_compile
from reference_server.model_server.quantization.packed_integers import pack_groups

PACKED_GROUPS = (256, 128, 64, 32)
"""Group sizes of torch's packed products."""
WORD_BITS = 32


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack integers of 2, 4 or 8 bits from 32-bit words along `dim`, lowest bits first. Returns uint8.

    >>> unpack(torch.tensor([[0x76543210]], dtype=torch.int32), 4, dim=1).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).movedim(-1, dim + 1).flatten(dim, dim + 1)


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """The inverse of `unpack`: int32 words. The dimension must fill whole words."""
    per_word = WORD_BITS // bits
    parts = _split(codes.to(torch.int64), dim, per_word).movedim(dim + 1, -1)
    words = (parts << torch.arange(0, WORD_BITS, bits)).sum(-1)
    # Values above the int32 range become negative, with the same bits.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _split(values: Tensor, dim: int, size: int) -> Tensor:
    """[..., n * size, ...] as [..., n, size, ...]."""
    return values.reshape(*values.shape[:dim], -1, size, *values.shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """One weight.

    codes: [outputs, inputs], uint8. scales, zeros: [outputs, groups], floating point; zeros are whole numbers.
    group_of: [inputs], int64.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]"""
        zeros, scales = self.zeros.float()[:, self.group_of], self.scales.float()[:, self.group_of]
        return ((self.codes - zeros) * scales).to(dtype)

    def product(self, dtype: torch.dtype, device: torch.device) -> "IntegerProduct | PackedInt4 | DequantizedIntegers":
        """The weight in the fastest form for this device."""
        ordered = self._grouped()
        if ordered is not None and can_compile(dtype, device):
            packed = pack_groups(ordered.codes, ordered.scales, ordered.zeros, self.bits)
            if packed is not None:
                return IntegerProduct(packed, dtype, _order(ordered, device))
        size = None if ordered is None else _packed_group(ordered, dtype, device)
        if ordered is not None and size is not None:
            return PackedInt4(ordered, size, dtype, device)
        return DequantizedIntegers(self if ordered is None else ordered, dtype, device)

    def _grouped(self) -> "GroupedIntegers | None":
        """The same weight with adjacent inputs in each group; None if the groups differ in size."""
        counts = torch.bincount(self.group_of, minlength=self.scales.shape[1])
        if counts.min() != counts.max():
            return None
        order = self.group_of.argsort(stable=True)
        if torch.equal(order, torch.arange(len(order))):
            return self
        return ReorderedIntegers(self.codes[:, order], self.scales, self.zeros, self.group_of[order], self.bits, order)


@dataclass(frozen=True, slots=True)
class ReorderedIntegers(GroupedIntegers):
    """A weight with permuted inputs: `order` [inputs], int64."""

    order: Tensor


def _order(weight: GroupedIntegers, device: torch.device) -> Tensor | None:
    return weight.order.to(device) if isinstance(weight, ReorderedIntegers) else None


def _packed_group(weight: GroupedIntegers, dtype: torch.dtype, device: torch.device) -> int | None:
    """The group size for torch's packed product; None if it does not support this weight.

    On a CPU in float32 that product is slower than dequantizing: 2304 x 768, 8 rows: 26 ms against 5.
    """
    outputs, inputs = weight.shape
    group = inputs // weight.scales.shape[1]
    if weight.bits != 4 or dtype != torch.bfloat16 or outputs % 16:
        return None
    if device.type == "cuda" and (inputs % 1024 or torch.cuda.get_device_capability(device) < (8, 0)):
        return None
    return next((size for size in PACKED_GROUPS if group % size == 0), None)


class PackedInt4:
    """Four-bit integers in the layout of torch's packed product."""

    kernel = "int4pack"

    def __init__(self, weight: GroupedIntegers, group: int, dtype: torch.dtype, device: torch.device) -> None:
        self._weight_shape = weight.shape
        self._group = group
        self._dtype = dtype
        self._device = device
        self._order = _order(weight, device)
        repeats = weight.shape[1] // weight.scales.shape[1] // group
        scales = weight.scales.float().repeat_interleave(repeats, 1)
        zeros = weight.zeros.float().repeat_interleave(repeats, 1)
        # The product computes (code - 8) * scale + zero.
        pairs = torch.stack([scales, (8 - zeros) * scales], -1)
        self._scales_and_zeros = pairs.transpose(0, 1).contiguous().to(device, dtype)
        self._packed = _pack_for(weight.codes.to(device))

    @property
    def nbytes(self) -> int:
        order = 0 if self._order is None else self._order.nbytes
        return self._packed.nbytes + self._scales_and_zeros.nbytes + order

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [rows, inputs]; returns [rows, outputs]."""
        ordered = rows if self._order is None else rows[:, self._order]
        product = (
            torch.ops.aten._weight_int4pack_mm
            if self._device.type == "cuda"
            else torch.ops.aten._weight_int4pack_mm_for_cpu
        )
        result: Tensor = product(ordered.contiguous(), self._packed, self._group, self._scales_and_zeros)
        return result

    def dequantize(self) -> Tensor:
        """[outputs, inputs]"""
        unit = torch.eye(self._weight_shape[1], dtype=self._dtype, device=self._device)
        return self(unit).t()


def _pack_for(codes: Tensor) -> Tensor:
    packed: Tensor
    if codes.device.type == "cuda":
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    return packed


class DequantizedIntegers:
    """Integers of any number of bits in any groups, dequantized for each product."""

    kernel = "dequantize"

    def __init__(self, weight: GroupedIntegers, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._inputs = weight.shape[1]
        self._bits = weight.bits
        self._order = _order(weight, device)
        counts = torch.bincount(weight.group_of, minlength=weight.scales.shape[1])
        is_even = bool(counts.min() == counts.max()) and bool((weight.group_of.diff() >= 0).all())
        self._group_of = None if is_even else weight.group_of.to(device)
        self._bytes = _in_bytes(weight.codes, weight.bits).to(device)
        self._scales = weight.scales.to(device, dtype)
        # Zeros are integers in the range of the codes.
        self._zeros = weight.zeros.to(device, torch.uint8)

    @property
    def nbytes(self) -> int:
        tensors = (self._bytes, self._scales, self._zeros, self._order, self._group_of)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [rows, inputs]; returns [rows, outputs]."""
        return F.linear(rows if self._order is None else rows[:, self._order], self._in_stored_order())

    def dequantize(self) -> Tensor:
        """[outputs, inputs]"""
        stored = self._in_stored_order()
        if self._order is None:
            return stored
        return torch.empty_like(stored).index_copy_(1, self._order, stored)

    def _in_stored_order(self) -> Tensor:
        codes = _from_bytes(self._bytes, self._bits, self._inputs).to(self._dtype)
        zeros = self._zeros.to(self._dtype)
        if self._group_of is not None:
            return (codes - zeros[:, self._group_of]) * self._scales[:, self._group_of]
        grouped = codes.view(len(codes), self._scales.shape[1], -1)
        return grouped.sub_(zeros[..., None]).mul_(self._scales[..., None]).flatten(1)


def _in_bytes(codes: Tensor, bits: int) -> Tensor:
    """Pack [outputs, inputs] into bytes, [outputs, inputs * bits / 8], padded with zeros."""
    per_byte = 8 // bits
    whole = _split(F.pad(codes, (0, -codes.shape[1] % per_byte)), 1, per_byte)
    result: Tensor = (whole << torch.arange(0, 8, bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return result


def _from_bytes(packed: Tensor, bits: int, inputs: int) -> Tensor:
    if bits == 8:
        return packed[:, :inputs]
    parts = [packed >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(1)[:, :inputs]
