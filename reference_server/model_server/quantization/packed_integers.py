"""Integer weights of 4 or 8 bits in the layout of the compiled CPU kernel (cpu_kernels/integers.h): panels of outputs.

`w = (code - zero) * scale`. A weight with one scale per output has no groups; its inputs are rounded in groups of
ROW_GROUP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.memory.weight_memory import placed

PANEL = 32
ROW_GROUP = 64
"""Inputs of a row that share a scale, where the weight has no groups."""
ROW_GROUPS = (128, 96, 64, 32)
"""Sizes into which larger groups of a weight are divided."""


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """A weight in the layout of the kernel.

    codes: [panels, groups, group / 4, outputs, 4] uint8, two outputs in a byte if `bits` is 4. multipliers:
    [panels, PANEL]. scales, zeros: [panels, groups, PANEL], float16 and uint8; None: 1, and the middle of the codes.
    """

    codes: Tensor
    multipliers: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    shape: tuple[int, int]
    bits: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        every = (self.codes, self.multipliers, self.scales, self.zeros)
        return tuple(tensor for tensor in every if tensor is not None)

    def in_weight_memory(self) -> "PackedIntegers":
        """A copy in the memory for weights."""
        return replace(
            self,
            codes=placed(self.codes),
            multipliers=placed(self.multipliers),
            scales=None if self.scales is None else placed(self.scales),
            zeros=None if self.zeros is None else placed(self.zeros),
        )

    def part(self, first: int, outputs: int) -> "PackedIntegers":
        """The weight of some outputs, in the same memory. first: a multiple of PANEL."""
        panels = slice(first // PANEL, -(-(first + outputs) // PANEL))
        return PackedIntegers(
            self.codes[panels],
            self.multipliers[panels],
            None if self.scales is None else self.scales[panels],
            None if self.zeros is None else self.zeros[panels],
            (outputs, self.shape[1]),
            self.bits,
        )

    def dequantize(self) -> Tensor:
        """[outputs, inputs], float32."""
        codes = torch.cat([self.codes & 15, self.codes >> 4], 3) if self.bits == 4 else self.codes
        whole = codes.permute(0, 3, 1, 2, 4).flatten(3).float()  # [panels, PANEL, groups, group]
        zeros = 1 << self.bits - 1 if self.zeros is None else self.zeros.transpose(1, 2)[..., None]
        weight = (whole - zeros) * self.multipliers[:, :, None, None]
        if self.scales is not None:
            weight *= self.scales.transpose(1, 2)[..., None]
        return weight.flatten(0, 1).flatten(1)[: self.shape[0], : self.shape[1]]


def pack_outputs(codes: Tensor, scales: Tensor) -> PackedIntegers:
    """A weight with one scale per output. codes: [outputs, inputs], int8; scales: [outputs]."""
    unsigned = (codes.to(torch.int16) + 128).to(torch.uint8)
    packed = _panels(unsigned, 8, ROW_GROUP, 128)
    return PackedIntegers(packed, _by_panel(scales.float()), None, None, _shape(codes), 8)


def pack_groups(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> PackedIntegers | None:
    """A weight in groups of adjacent inputs; None if the kernel does not have such groups.

    codes: [outputs, inputs], uint8 below 2^bits; scales, zeros: [outputs, groups].
    """
    size = _row_group(codes.shape[1], scales.shape[1])
    if bits not in (4, 8) or size is None:
        return None
    packed = _panels(codes, bits, size, 1 << bits - 1)
    repeats = packed.shape[1] // scales.shape[1]
    scales, zeros = (part.float().repeat_interleave(repeats, 1) for part in (scales, zeros))
    # Powers of two: float16 scales divided by them stay exact, and bfloat16 ones come into the range of float16.
    multipliers = torch.exp2(scales.abs().amax(1).clamp(min=1e-30).log2().ceil())
    is_middle = bool((zeros == 1 << bits - 1).all())
    return PackedIntegers(
        packed,
        _by_panel(multipliers),
        _by_panel(scales / multipliers[:, None]).transpose(1, 2).to(torch.float16).contiguous(),
        None if is_middle else _by_panel(zeros).transpose(1, 2).to(torch.uint8).contiguous(),
        _shape(codes),
        bits,
    )


def stack(weights: Sequence[PackedIntegers]) -> PackedIntegers | None:
    """One weight with the outputs of all, in order; None if their layouts differ or a panel is not full."""
    layouts = {(each.codes.shape[1:], each.scales is None, each.zeros is None, each.shape[1]) for each in weights}
    if len(layouts) > 1 or any(each.shape[0] % PANEL for each in weights):
        return None
    scales = [each.scales for each in weights if each.scales is not None]
    zeros = [each.zeros for each in weights if each.zeros is not None]
    return replace(
        weights[0],
        codes=torch.cat([each.codes for each in weights]),
        multipliers=torch.cat([each.multipliers for each in weights]),
        scales=torch.cat(scales) if scales else None,
        zeros=torch.cat(zeros) if zeros else None,
        shape=(sum(each.shape[0] for each in weights), weights[0].shape[1]),
    )


def _row_group(inputs: int, groups: int) -> int | None:
    """Inputs of a row that share a scale, for a weight with `groups`; None if the kernel does not have such groups."""
    if groups == 1:
        return ROW_GROUPS[0]
    size = inputs // groups
    divisor = next((each for each in ROW_GROUPS if size % each == 0), size)
    return divisor if divisor % 4 == 0 else None


def _shape(codes: Tensor) -> tuple[int, int]:
    return codes.shape[0], codes.shape[1]


def _by_panel(values: Tensor) -> Tensor:
    """[outputs, ...] as [panels, PANEL, ...], padded with zeros."""
    padding = (*(0, 0) * (values.dim() - 1), 0, -len(values) % PANEL)
    return F.pad(values, padding).view(-1, PANEL, *values.shape[1:])


def _panels(codes: Tensor, bits: int, group: int, middle: int) -> Tensor:
    """[outputs, inputs] in the layout of the kernel."""
    outputs, inputs = codes.shape
    whole = F.pad(codes, (0, -inputs % group, 0, -outputs % PANEL), value=middle)
    quads = whole.view(-1, PANEL, whole.shape[1] // group, group // 4, 4).permute(0, 2, 3, 1, 4)
    if bits == 8:
        return quads.contiguous()
    low, high = quads.chunk(2, 3)
    return (low | high << 4).contiguous()
