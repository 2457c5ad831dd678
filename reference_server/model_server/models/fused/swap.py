"""Replaces single modules of a decoder that is not fused: norms and the tanh GELU by one operator each.

A module is recognised by its result on a sample, not by its class. Transformers computes the tanh form of GELU in seven
operators.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_server.model_server.models.fused.operators import Norm, norm_of, operators_for


class SingleNorm(nn.Module):
    """A root-mean-square norm as one operator."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight, requires_grad=False)
        self._norm = norm
        self._operators = operators_for(norm.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., size]; returns the same shape."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return self._operators.add_norm(rows, None, self._norm).view(hidden.shape)


def swap_modules(model: nn.Module) -> int:
    """Replace the recognised modules; returns their number."""
    swapped = 0
    for name, module in list(model.named_modules()):
        replacement = _replacement(module)
        if replacement is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)
            swapped += 1
    return swapped


def _replacement(module: nn.Module) -> nn.Module | None:
    # Torch's own modules are one operator already.
    if type(module).__module__.startswith("torch.") or next(module.children(), None) is not None:
        return None
    parameters = list(module.parameters())
    if not parameters:
        return nn.GELU("tanh") if _is_tanh_gelu(module) else None
    if len(parameters) == 1 and parameters[0].dim() == 1:
        norm = norm_of(module)
        return None if norm is None else SingleNorm(norm)
    return None


def activation_of(module: Any) -> Any:
    """The activation as one operator if it is the tanh GELU, else the module."""
    return functools.partial(F.gelu, approximate="tanh") if _is_tanh_gelu(module) else module


def _is_tanh_gelu(module: Any) -> bool:
    if "gelu" not in type(module).__name__.lower():
        return False
    sample = torch.linspace(-4.0, 4.0, 33)
    return torch.allclose(module(sample), F.gelu(sample, approximate="tanh"), rtol=1e-5, atol=1e-6)
