"""Quantize a model's linears while they are loaded, or load them from a quantized checkpoint."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from reference_server.errors import StartupError
from reference_server.model_server.models.tensor_parallel.rank_modules import RowParallelConv1D, RowParallelLinear
from reference_server.model_server.quantization.int8 import round_to_int8
from reference_server.model_server.quantization.integers import IntegerProduct
from reference_server.model_server.quantization.linear import QuantizedLinear
from reference_server.model_server.quantization.packed_checkpoint import PackedCheckpoint
from reference_server.model_server.quantization.schemes import Quantization
from reference_server.model_server.weights.cut import Cut

logger = logging.getLogger(__name__)

# Routers and gates choose experts, and rounding would change the choice. T5's `wo` overflows.
SENSITIVE = ("gate", "router", "shared_expert_gate", "wo", "classifier", "score")
MIN_SIZE = 16
"""Smallest numbers of inputs and outputs of a linear that is quantized."""


class Quantizer:
    """Replaces the linears of one model by quantized ones.

    plain: names of the weights to quantize if the checkpoint is plain. cuts: this rank's parts of the sharded weights.
    """

    def __init__(
        self,
        model: Any,
        quantization: Quantization,
        plain: Iterable[str],
        cuts: Mapping[str, Cut],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._quantization = quantization
        self._cuts = cuts
        self._dtype = dtype
        self._device = device
        # By the name of the weight.
        self._linears: dict[str, QuantizedLinear] = {}
        self._transposed: set[str] = set()
        if quantization.form is None:
            for name in plain:
                self._replace(name, self._own_shape(name))

    def quantize(self, name: str, weight: Tensor) -> bool:
        """Quantize a plain weight on the device; False if it is not to be quantized."""
        linear = self._linears.get(name)
        if linear is None or linear.product is not None:
            return False
        assert self._quantization.scheme.quantize is not None
        rows = weight.t().contiguous() if name in self._transposed else weight
        linear.load(self._quantization.scheme.quantize(rows), self._dtype, self._device)
        return True

    def load(self, name: str, source: str, checkpoint: PackedCheckpoint) -> bool:
        """Load this rank's part of the quantized weight `source`; False if that is plain or must be dequantized."""
        if not checkpoint.is_packed(source):
            return False
        module = self._model.get_submodule(name.rpartition(".")[0])
        if not _is_linear(module):
            logger.warning("%s is quantized in the checkpoint and dequantized to %s", source, self._dtype)
            return False
        cut = self._cuts.get(name)
        if cut is not None and _is_transposed(module):
            cut = replace(cut, dim=1 - cut.dim)
        weight = checkpoint.packed(source, cut)
        expected = self._own_shape(name)
        if weight.shape != expected:
            raise StartupError(f"weight {source} has shape {weight.shape} on this shard, expected {expected}")
        self._replace(name, expected).load(weight.product(self._dtype, self._device), self._dtype, self._device)
        return True

    def _own_shape(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of this rank's part of a linear."""
        module = self._model.get_submodule(name.rpartition(".")[0])
        full = tuple(module.weight.shape)
        cut = self._cuts.get(name)
        first, second = full if cut is None else cut.shape(full)
        return (second, first) if _is_transposed(module) else (first, second)

    def _replace(self, name: str, shape: tuple[int, int]) -> QuantizedLinear:
        path = name.rpartition(".")[0]
        module = self._model.get_submodule(path)
        if _is_transposed(module):
            self._transposed.add(name)
        linear = QuantizedLinear(module, shape, sums=isinstance(module, RowParallelLinear))
        parent, _, child = path.rpartition(".")
        setattr(self._model.get_submodule(parent), child, linear)
        self._linears[name] = linear
        return linear


def quantizable(model: Any, quantization: Quantization) -> list[str]:
    """Names of the weights that a method quantizes in a plain checkpoint, without embedding and head."""
    head = model.get_output_embeddings()
    excluded = quantization.excluded(int(getattr(model.config, "num_hidden_layers", 0)))
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if _is_linear(module)
        and module is not head
        and name.rpartition(".")[2] not in SENSITIVE
        and min(module.weight.shape) >= MIN_SIZE
        and not excluded.search(name)
    ]


def round_head(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Round a plain head to int8 if the weights use the compiled product, which reads it in half the time.

    The head of a small model is a quarter of the bytes that a decode step reads, or half of them with four-bit weights.
    The embedding keeps its weight, also if both are tied.
    """
    head = model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if type(head) is not nn.Linear or not any(isinstance(linear.product, IntegerProduct) for linear in linears):
        return
    outputs, inputs = head.weight.shape
    rounded = QuantizedLinear(head, (outputs, inputs), sums=False)
    rounded.load(round_to_int8(head.weight.detach()), dtype, device)
    model.set_output_embeddings(rounded)


def quantized_bytes(model: nn.Module) -> int:
    """Bytes of the quantized weights of a model."""
    return sum(module.nbytes for module in model.modules() if isinstance(module, QuantizedLinear))


def kernels_of(model: nn.Module) -> list[str]:
    """Names of the kernels that multiply the quantized weights of a model."""
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return sorted({linear.product.kernel for linear in linears if linear.product is not None})


def _is_linear(module: Any) -> bool:
    # FalconLinear is nn.Linear with the bias added separately.
    by_name = type(module).__name__ in ("Conv1D", "FalconLinear")
    return by_name or type(module) in (nn.Linear, RowParallelLinear, RowParallelConv1D)


def _is_transposed(module: Any) -> bool:
    return "Conv1D" in type(module).__name__
