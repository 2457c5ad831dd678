"""The weights of a speculator: read with checks of names and shapes, and packed for the device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reference_server.errors import StartupError
from reference_server.model_server.models.fused.fused_linear import stacked, take_weights
from reference_server.model_server.models.fused.walk import Linear
from reference_server.model_server.weights.checkpoint import Checkpoint, open_weights

MOST_HEADS = 64


class SpeculatorWeights:
    """The tensors of a checkpoint, in the compute type on the device."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self.num_bytes = 0
        """Bytes of the tensors taken so far."""

    @classmethod
    def open(cls, files: Sequence[Path], dtype: torch.dtype, device: torch.device) -> "SpeculatorWeights":
        return cls(Checkpoint({path: open_weights(path) for path in files}), dtype, device)

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint.shapes

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape. Raises StartupError."""
        found = self._checkpoint.shapes.get(name)
        if found is None:
            raise StartupError(f"weight {name} is missing")
        if found != shape:
            raise StartupError(f"weight {name} has shape {found}, expected {shape}")
        # A copy: the tensor is mapped from the file.
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device).copy_(self._checkpoint.read(name))
        self.num_bytes += tensor.nbytes
        return tensor

    def linear(self, name: str, outputs: int, inputs: int, *, has_bias: bool = False) -> nn.Linear:
        linear = nn.Linear(1, 1, bias=has_bias, device="meta")
        linear.weight = nn.Parameter(self.take(f"{name}.weight", outputs, inputs), requires_grad=False)
        if has_bias:
            linear.bias = nn.Parameter(self.take(f"{name}.bias", outputs), requires_grad=False)
        return linear


def packed(*linears: nn.Linear) -> Linear:
    """All linears as one product in the device's fastest form: [rows, inputs] -> [rows, outputs], outputs in order."""
    return take_weights(stacked(*linears))


def number_of(config: Mapping[str, Any], name: str, most: int) -> int:
    """A positive integer of a speculator's config. Raises StartupError."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise StartupError(f"config.json: `{name}` is {value!r:.40}, but must be an integer from 1 to {most}")
    return value


def best_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best ids, int64, and their logprobs, float32; both without the last dimension, vocab_size."""
    logprobs, ids = torch.log_softmax(logits, -1, dtype=torch.float32).max(-1)
    return ids, logprobs
