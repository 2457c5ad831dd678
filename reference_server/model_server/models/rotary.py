"""Rotary positions whose frequencies depend on a length, computed from each request's own length.

Transformers computes them from the longest row of a forward, so that a request's result would depend on the others.
Rope types that depend on the position only keep Transformers' module.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from reference_server.errors import ArgumentError, UnsupportedError
from reference_server.model_server.models import transformers_compat
from reference_server.model_server.options import RopeOverride
from reference_server.model_server.step_state import StepState

LENGTH_DEPENDENT = ("dynamic", "longrope")
# The config's own parameters that an override keeps: the base frequencies, not their scaling.
UNSCALED = ("rope_theta", "partial_rotary_factor")


def override(config: PretrainedConfig, rope: RopeOverride) -> None:
    """Replace the config's scaling by `--rope-scaling`; if layers differ, that of the global attention layers."""
    parameters = transformers_compat.rope_parameters(config)
    if not parameters:
        raise ArgumentError(f"`--rope-scaling` has no effect on {config.model_type}: it has no rotary positions")
    if "full_attention" in parameters:
        config.rope_parameters = parameters | {"full_attention": _scaled(parameters["full_attention"], rope)}
    else:
        config.rope_parameters = _scaled(parameters, rope)


def _scaled(parameters: dict[str, Any], rope: RopeOverride) -> dict[str, Any]:
    kept = {name: parameters[name] for name in UNSCALED if name in parameters}
    return kept | {"rope_type": rope.type, "factor": rope.factor}


def install(model: nn.Module, state: StepState, prefix_caching: bool) -> None:
    """Replace every rotary module of a length-dependent type; raises an error for one that cannot be replaced."""
    for name, module in _length_dependent(model):
        rope_type = module.rope_type
        if isinstance(rope_type, dict):
            raise UnsupportedError(f"length-dependent rope types per layer are not served: {rope_type}")
        if rope_type == "dynamic" and prefix_caching:
            raise ArgumentError(
                "`--prefix-caching true` cannot be served with dynamic rope scaling: the keys of a prefix depend on "
                "the length of the whole prompt"
            )
        parent, _, child = name.rpartition(".")
        own = DynamicRotary(module, state) if rope_type == "dynamic" else LongRotary(module, state)
        _refuse_another_form(module, own)
        setattr(model.get_submodule(parent), child, own)


def refuse(model: nn.Module) -> None:
    """Raise UnsupportedError for a length-dependent type, in a forward that keeps the model's own modules."""
    for _, module in _length_dependent(model):
        raise UnsupportedError(f"rope type {module.rope_type} is not served for {type(model).__name__}")


def needs_lengths(model: nn.Module) -> bool:
    """Whether a decode step of the model reads the request lengths on the host."""
    return any(isinstance(module, DynamicRotary) for module in model.modules())


def original_maximum(model: nn.Module) -> int | None:
    """The length after which `longrope` rotates all positions of a request by other factors; None without it."""
    return min((module.original for module in model.modules() if isinstance(module, LongRotary)), default=None)


def _length_dependent(model: nn.Module) -> list[tuple[str, Any]]:
    found = []
    for name, module in model.named_modules():
        rope_type: Any = getattr(module, "rope_type", None)
        types = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
        if any(each in LENGTH_DEPENDENT for each in types):
            found.append((name, module))
    return found


class DynamicRotary(nn.Module):
    """`dynamic`: the base grows with the request's length, which is the whole prompt's during its prefill."""

    def __init__(self, rotary: Any, state: StepState) -> None:
        super().__init__()
        self.rope_type = "dynamic"
        self._config = rotary.config
        self._state = state

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids: [1, tokens]. Cosines and sines, each [1, tokens, rotary size]."""
        frequencies, scaling = ROPE_INIT_FUNCTIONS["dynamic"](
            self._config, hidden.device, seq_len=_lengths(self._state, position_ids[0])[:, None]
        )
        return _cos_sin(position_ids, frequencies, scaling, hidden.dtype)


class LongRotary(nn.Module):
    """`longrope`: short factors for a request within the original maximum, long ones for all tokens of a longer one.

    A request that grows past the maximum needs its K/V again: forward/long_rope.py.
    """

    def __init__(self, rotary: Any, state: StepState) -> None:
        super().__init__()
        self.rope_type = "longrope"
        self._state = state
        config = rotary.config
        device = rotary.inv_freq.device
        parameters = config.rope_parameters
        self.original: int = parameters["original_max_position_embeddings"]
        short, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, device)
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=self.original + 1)
        self._frequencies = torch.stack((short, long))
        # PhiMoE configures two scalings; the others have one, computed from the maxima.
        scalings = [parameters.get("short_mscale", scaling), parameters.get("long_mscale", scaling)]
        self._scalings = torch.tensor(scalings, device=device)[:, None]

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids: [1, tokens]. Cosines and sines, each [1, tokens, rotary size]."""
        is_long = (_lengths(self._state, position_ids[0]) > self.original).long()
        return _cos_sin(position_ids, self._frequencies[is_long], self._scalings[is_long], hidden.dtype)


def _lengths(state: StepState, positions: Tensor) -> Tensor:
    """[tokens]: the length so far of each token's request."""
    metadata = None if state.step is None else state.step.metadata
    if metadata is None or metadata.known_len is None:
        # The last token of its request: no length is read from the host, so that the step can be captured.
        return positions + 1
    return torch.from_numpy(np.repeat(metadata.known_len, metadata.seqlen_q)).to(positions.device)


def _cos_sin(
    position_ids: Tensor, frequencies: Tensor, scaling: float | Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """frequencies: [tokens, half the rotary size]."""
    angles = position_ids[0, :, None].float() * frequencies
    doubled = torch.cat((angles, angles), -1)[None]
    return (doubled.cos() * scaling).to(dtype), (doubled.sin() * scaling).to(dtype)


def _refuse_another_form(rotary: Any, own: nn.Module) -> None:
    """Raise UnsupportedError if the family interleaves the halves or computes complex numbers."""
    device = next(rotary.buffers()).device
    positions = torch.arange(2, device=device)[None]
    hidden = torch.zeros(1, dtype=torch.float32, device=device)
    expected, ours = rotary(hidden, positions), own(hidden, positions)
    if not (isinstance(expected, tuple) and all(map(torch.allclose, expected, ours))):
        raise UnsupportedError(f"rope type {rotary.rope_type!r} of {type(rotary).__name__} is not served")
