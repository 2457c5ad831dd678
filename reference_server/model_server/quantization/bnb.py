"""Products of bitsandbytes: LLM.int8() with outlier inputs in 16 bits, and four-bit NF4 and FP4."""

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

OUTLIER_THRESHOLD = 6.0
"""Inputs of greater magnitude are multiplied in 16 bits (LLM.int8(), section 3.2)."""
PACKED_OUTPUTS = 32
BLOCK = 64

# On import it logs a hint on the optional `kernels` package.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _library() -> Any:
    return importlib.import_module("bitsandbytes")


def round_to_int8(weight: Tensor) -> "BitsAndBytesProduct":
    """Round a weight [outputs, inputs] for LLM.int8()."""
    bnb = _library()
    outputs, inputs = weight.shape
    module = bnb.nn.Linear8bitLt(
        inputs, outputs, bias=False, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD, device="meta"
    )
    module.weight = bnb.nn.Int8Params(_copied(weight), requires_grad=False, has_fp16_weights=False)
    return BitsAndBytesProduct(module, weight)


def round_to_nf4(weight: Tensor) -> "BitsAndBytesProduct":
    """Round a weight [outputs, inputs] to four-bit NormalFloat."""
    return _four_bits(weight, "nf4")


def round_to_fp4(weight: Tensor) -> "BitsAndBytesProduct":
    """Round a weight [outputs, inputs] to four-bit floating point."""
    return _four_bits(weight, "fp4")


def _four_bits(weight: Tensor, kind: str) -> "BitsAndBytesProduct":
    bnb = _library()
    outputs, inputs = weight.shape
    module = bnb.nn.Linear4bit(
        inputs,
        outputs,
        bias=False,
        compute_dtype=weight.dtype,
        quant_type=kind,
        compress_statistics=True,
        device="meta",
    )
    module.weight = bnb.nn.Params4bit(_copied(weight), requires_grad=False, quant_type=kind, compress_statistics=True)
    # The packed CPU layout of the library requires multiples of these sizes.
    module.support_avx512bf16_for_cpu &= outputs % PACKED_OUTPUTS == 0 and inputs % BLOCK == 0
    return BitsAndBytesProduct(module, weight)


def _copied(weight: Tensor) -> Tensor:
    """A copy, because the library quantizes parameters in place when they are moved."""
    return weight.detach().clone()


class BitsAndBytesProduct:
    """A quantized linear of the library, frozen."""

    kernel = "bitsandbytes"

    def __init__(self, module: Any, weight: Tensor) -> None:
        self._module = module.to(weight.device).eval().requires_grad_(False)
        # The first product converts the weight to its final layout.
        with torch.no_grad():
            self._module(weight.new_zeros(1, weight.shape[1]))
        self._dtype = weight.dtype

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors() if tensor is not None)

    def _tensors(self) -> list[Tensor | None]:
        data = self._module.weight.data
        state: Any = getattr(self._module.weight, "quant_state", None)
        if state is None:
            return [data, self._module.state.SCB]
        nested: Any = getattr(state, "state2", None)
        return [data, state.absmax, *(() if nested is None else (nested.absmax, nested.code))]

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [rows, inputs]; returns [rows, outputs]."""
        result: Tensor = self._module(rows)
        return result

    def dequantize(self) -> Tensor:
        """[outputs, inputs], computed as a product with the identity, because the layout is internal to the library."""
        weight = self._module.weight
        return self(torch.eye(self._module.in_features, dtype=self._dtype, device=weight.device)).t()
