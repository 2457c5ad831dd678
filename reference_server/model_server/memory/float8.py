"""The eight-bit types of a K/V cache: names, rounding and widening in plain torch.

Values round to the nearest even. A value beyond the range becomes the largest one. Widening to any
compute type is exact.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

FLOAT8_TYPES: Mapping[str, torch.dtype] = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""By the names of `--kv-cache-dtype`."""


def is_float8(dtype: torch.dtype) -> bool:
    """Whether a cache of this type is rounded when it is written and widened when it is read."""
    return dtype in FLOAT8_TYPES.values()


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest values of an eight-bit type."""
    largest = torch.finfo(dtype).max
    # Older releases of torch turn a value beyond the range into NaN.
    return values.clamp(-largest, largest).to(dtype)


def widened(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements of a cache in the compute type, without a copy if they have it."""
    return values.to(dtype) if is_float8(values.dtype) else values
