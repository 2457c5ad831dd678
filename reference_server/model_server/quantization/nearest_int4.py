"""Round a plain weight to four bits at load (`--quantize int4`): one scale per group of inputs, codes around 8.

The scale of a group is the one of a few candidates with the least squared error; no calibration text is used.
"""

import torch
from torch import Tensor

from reference_server.model_server.quantization.int4 import GroupedIntegers
from reference_server.model_server.quantization.linear import Product

GROUPS = (64, 32, 16, 8, 4)
"""Inputs that share a scale: the first of these sizes that divides the inputs."""
MIDDLE = 8
SPANS = (-8.0, -7.0, -9.0)
"""Codes, minus MIDDLE, that are tried for a group's largest weight. -8: the codes reach exactly that weight. -7: they
also reach a weight of the other sign and the same size. -9: that weight is clipped, and the others get finer steps."""
CHUNK = 1 << 18
"""Weights that are rounded together. Their float32 copies stay in the cache: 17 ns a weight, and 34 ns with four times
as many."""


def round_to_int4(weight: Tensor) -> Product:
    """Round a weight [outputs, inputs] to the nearest steps."""
    outputs, inputs = weight.shape
    group = next((size for size in GROUPS if inputs % size == 0), inputs)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // group)
    rows = max(1, CHUNK // inputs)
    for first in range(0, outputs, rows):
        part = slice(first, first + rows)
        codes[part], scales[part] = _nearest(weight[part].cpu().float(), group)
    zeros = torch.full_like(scales, MIDDLE)
    grouped = GroupedIntegers(codes, scales, zeros, torch.arange(inputs) // group, bits=4)
    return grouped.product(weight.dtype, weight.device)


def _nearest(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes [outputs, inputs] and scales [outputs, groups] of a float32 weight."""
    groups = weight.view(len(weight), -1, group)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = largest / torch.tensor(SPANS).view(-1, 1, 1, 1)  # [spans, outputs, groups, 1]
    codes = (groups / scales.where(scales != 0, 1.0)).round_().clamp_(-MIDDLE, MIDDLE - 1)
    best = (codes * scales - groups).square_().sum(3, keepdim=True).argmin(0, keepdim=True)
    chosen = codes.gather(0, best.expand(1, *groups.shape))[0]
    return chosen.add_(MIDDLE).to(torch.uint8).flatten(1), scales.gather(0, best)[0].squeeze(2)
