"""GPTQ: round a weight to few bits with the least error of its outputs.

Columns are rounded in order. The error of a column is compensated in the columns that follow, by the second-order rule
of GPTQ (Frantar et al., 2022, arXiv:2210.17323, algorithm 1).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference_server.model_server.quantization.int4 import GroupedIntegers

GROUP_SIZES = (128, 64, 32, 16)
"""Group sizes that all readers of GPTQ checkpoints support."""
BLOCK = 128
"""Columns whose errors are applied to later columns in one product."""
MIN_SCALE = 2.0**-24
"""The least positive float16."""
MAX_DAMPING = 1.0


@dataclass(frozen=True, slots=True)
class GPTQSettings:
    """Settings of the rounding.

    group_size: inputs that share a scale, -1: all inputs. None: chosen by `fitted`.
    damping: added to the diagonal of the Hessian, as a fraction of its mean.
    act_order: round inputs in descending order of magnitude, so that a group has inputs of similar magnitude.
    static_groups: with `act_order`, groups are still of neighbours, and all scales are chosen before rounding.
    symmetric: the zero is the middle of the range.
    """

    bits: int = 4
    group_size: int | None = None
    damping: float = 0.01
    act_order: bool = False
    static_groups: bool = False
    symmetric: bool = True

    def fitted(self, input_sizes: Collection[int]) -> "GPTQSettings":
        """The settings with a group size; default is the largest of GROUP_SIZES that divides all `input_sizes`.

        >>> GPTQSettings().fitted([192, 384]).group_size
        64
        """
        if self.group_size is not None:
            return self
        dividing = (size for size in GROUP_SIZES if not any(inputs % size for inputs in input_sizes))
        return replace(self, group_size=next(dividing, -1))


class Hessian:
    """The second moment of a linear's inputs: the Hessian of its squared output error, up to a factor."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self._sum = torch.zeros(inputs, inputs, dtype=torch.float32, device=device)
        self._rows = 0

    def add(self, inputs: Tensor) -> None:
        """inputs: [..., inputs], any floating type."""
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        self._sum.addmm_(rows.t(), rows)
        self._rows += len(rows)

    def mean(self) -> Tensor:
        """[inputs, inputs], float32: twice the mean over all rows."""
        return self._sum * (2 / max(self._rows, 1))


@dataclass(frozen=True, slots=True)
class QuantizationGrid:
    """The representable values of a group of inputs: `(code - zero) * scale`. scale, zero: [outputs]."""

    scale: Tensor
    zero: Tensor
    top: int

    @classmethod
    def of(cls, weight: Tensor, settings: GPTQSettings) -> "QuantizationGrid":
        """The grid over the range of `weight` [outputs, columns], extended to zero.

        Scales are float16 values, as in the file. Zeros are at least 1: the file stores `zero - 1`, and readers add 1
        to whole words, where a carry would change the next code.
        """
        top = (1 << settings.bits) - 1
        low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
        if settings.symmetric:
            high = torch.maximum(high, -low)
            return cls(_as_float16(2 * high / top), torch.full_like(high, (top + 1) // 2), top)
        even = (high - low) / top
        scale = _as_float16(torch.where(-low < even / 2, high / (top - 1), even))
        return cls(scale, (-low / scale).round().clamp(1, top), top)

    def codes(self, column: Tensor) -> Tensor:
        """The nearest codes of a column [outputs]."""
        return (column / self.scale + self.zero).round().clamp(0, self.top)

    def values(self, codes: Tensor) -> Tensor:
        """The values of the codes of a column: [outputs]."""
        return (codes - self.zero) * self.scale


def _as_float16(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale.half().float().clamp(min=MIN_SCALE), torch.ones_like(scale))


def round_weight(weight: Tensor, hessian: Tensor, settings: GPTQSettings) -> GroupedIntegers:
    """The rounded weight, on the CPU. With the identity as Hessian this rounds to nearest.

    weight: [outputs, inputs]; hessian: [inputs, inputs], float32, on the same device. Raises ValueError for values that
    are not finite, a scale beyond float16, and a Hessian that damping does not make positive definite.
    """
    if not weight.isfinite().all() or not hessian.isfinite().all():
        raise ValueError("its weights or its calibration inputs are not finite")
    rows, hessian = weight.detach().float().clone(), hessian.clone()
    # Inputs that are always zero: their weights have no effect.
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1
    rows[:, dead] = 0
    fitted = settings.fitted([rows.shape[1]]).group_size
    size = fitted if fitted is not None and fitted > 0 else rows.shape[1]
    order = torch.arange(rows.shape[1], device=rows.device)
    if settings.act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    group_at = (order if settings.static_groups else torch.arange(len(order), device=rows.device)) // size
    grids = (
        [QuantizationGrid.of(group, settings) for group in torch.split(rows, size, 1)] if settings.static_groups else []
    )
    factor = _inverse_factor(hessian[order][:, order], settings.damping)
    codes = _rounded_in_order(rows[:, order], factor, settings, size, group_at.tolist(), grids)
    scales, zeros = (torch.stack([getattr(grid, name) for grid in grids], 1) for name in ("scale", "zero"))
    if not scales.isfinite().all():
        raise ValueError("a scale exceeds the range of float16")
    back = order.argsort()
    return GroupedIntegers(codes[:, back].cpu(), scales.cpu(), zeros.cpu(), group_at[back].cpu(), settings.bits)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse: row i compensates the error of column i."""
    mean = hessian.diagonal().mean()
    while damping <= MAX_DAMPING:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and upper.isfinite().all():
                return upper
        damping *= 10
    raise ValueError(f"no damping up to {MAX_DAMPING:g} makes its Hessian positive definite")


def _rounded_in_order(
    rows: Tensor, factor: Tensor, settings: GPTQSettings, size: int, group_at: list[int], grids: list[QuantizationGrid]
) -> Tensor:
    """Codes of `rows` [outputs, inputs], rounded column by column; appends missing grids to `grids`."""
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    for start, end in _blocks(rows.shape[1], size):
        errors = torch.empty_like(rows[:, start:end])
        with _one_thread():
            for place in range(start, end):
                if group_at[place] == len(grids):
                    grids.append(QuantizationGrid.of(rows[:, place : place + size], settings))
                grid, column = grids[group_at[place]], rows[:, place]
                chosen = grid.codes(column)
                codes[:, place] = chosen
                error = (column - grid.values(chosen)) / factor[place, place]
                rows[:, place + 1 : end] -= error[:, None] * factor[place, place + 1 : end]
                errors[:, place - start] = error
        rows[:, end:] -= errors @ factor[start:end, end:]
    return codes


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one CPU thread: the steps of a column are too short for more. 384 x 192: 0.02 s, on two busy cores 0.3 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _blocks(columns: int, size: int) -> Iterator[tuple[int, int]]:
    """Blocks of at most BLOCK columns, so that all earlier errors are applied to a group before its grid is chosen.

    >>> list(_blocks(300, 48))
    [(0, 96), (96, 192), (192, 288), (288, 300)]
    >>> list(_blocks(300, 200))
    [(0, 128), (128, 200), (200, 300)]
    """
    stride = size if size > BLOCK else BLOCK // size * size
    for first in range(0, columns, stride):
        last = min(first + stride, columns)
        for start in range(first, last, BLOCK):
            yield start, min(start + BLOCK, last)
