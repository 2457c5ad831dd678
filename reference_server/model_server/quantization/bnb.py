"""bitsandbytes' products: eight-bit integers with the large inputs in sixteen bits, and the four-bit NF4 and FP4."""

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

OUTLIER_THRESHOLD = 6.0
"""Inputs beyond it are multiplied in sixteen bits (LLM.int8(), section 3.2)."""
PACKED_OUTPUTS = 32
BLOCK = 64

# Without the optional `kernels` package it says on import that a faster product could be fetched.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _library() -> Any:
    return importlib.import_module("bitsandbytes")


def round_to_int8(weight: Tensor) -> "BitsAndBytesProduct":
    """A weight [outputs, inputs] for LLM.int8()."""
    bnb = _library()
    outputs, inputs = weight.shape
    module = bnb.nn.Linear8bitLt(
        inputs, outputs, bias=False, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD, device="meta"
    )
    module.weight = bnb.nn.Int8Params(_own(weight), requires_grad=False, has_fp16_weights=False)
    return BitsAndBytesProduct(module, weight)


def round_to_nf4(weight: Tensor) -> "BitsAndBytesProduct":
    """A weight [outputs, inputs] in four bits whose steps are normally distributed."""
    return _four_bits(weight, "nf4")


def round_to_fp4(weight: Tensor) -> "BitsAndBytesProduct":
    """A weight [outputs, inputs] in four-bit floating point."""
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
    module.weight = bnb.nn.Params4bit(_own(weight), requires_grad=False, quant_type=kind, compress_statistics=True)
    # The library's packed layout for CPUs asserts these sizes.
    module.support_avx512bf16_for_cpu &= outputs % PACKED_OUTPUTS == 0 and inputs % BLOCK == 0
    return BitsAndBytesProduct(module, weight)


def _own(weight: Tensor) -> Tensor:
    """The library quantizes parameters in place when they are moved."""
    return weight.detach().clone()


class BitsAndBytesProduct:
    """One of the library's modules, quantized and frozen."""

    kernel = "bitsandbytes"

    def __init__(self, module: Any, weight: Tensor) -> None:
        self._module = module.to(weight.device).eval().requires_grad_(False)
        # The library brings a weight into its last layout when it is first multiplied.
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
        """[outputs, inputs], as products with the unit vectors: the layout is the library's own."""
        weight = self._module.weight
        return self(torch.eye(self._module.in_features, dtype=self._dtype, device=weight.device)).t()
