"""The quantization methods, their requirements, and the choice of one for a model."""

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference_server.errors import UnsupportedError
from reference_server.model_server.options import Tier
from reference_server.model_server.quantization import bnb, fp8, int8, nearest_int4
from reference_server.model_server.quantization.formats import Format, find_format
from reference_server.model_server.quantization.linear import Product

NO_NAME = re.compile(r"(?!)")
ATTENTION = r"(^|\.)(self_attn|attn|attention|self_attention|SelfAttention|EncDecAttention|encoder_attn)\."


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """One value of `--quantize`.

    quantize: quantizes a plain weight [outputs, inputs]; None if the method needs a quantized checkpoint.
    formats: supported checkpoint formats. mlp_only: do not quantize the attention nor the first and last block.
    package: a required library of the extra `quantization`. is_capturable: CUDA graphs can capture its products.
    is_sharded: weights can be divided over shards.
    """

    name: str
    bits: float
    meaning: str
    quantize: Callable[[Tensor], Product] | None = None
    formats: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    kernels: tuple[str, str] = ("", "")
    mlp_only: bool = False
    package: str | None = None
    is_capturable: bool = True
    is_sharded: bool = True


_FOR_PLAIN = "plain checkpoints work with eetq, int4, fp8, bitsandbytes, bitsandbytes-nf4, bitsandbytes-fp4"
_COMPILED = "compiled with AVX-512 VNNI or AVX2, inputs rounded to int8"
_INT4_TORCH = "torch's int4 product in bfloat16, else dequantized"
_INT8_TORCH = "torch's int8 product for few rows in bfloat16, else dequantized"
_INT4 = (f"{_COMPILED}; else {_INT4_TORCH}", _INT4_TORCH)
_INT8 = (f"{_COMPILED}; else {_INT8_TORCH}", _INT8_TORCH)
_FP8 = (
    "compiled with AVX-512 BF16 and VBMI in bfloat16, else dequantized for each product",
    "`_scaled_mm` from capability 8.9 on, else dequantized",
)
_BNB = ("bitsandbytes", "bitsandbytes")
_EXL2 = ("dequantized for each product: less memory, less speed",) * 2

SCHEMES = (
    QuantizationScheme(
        "eetq", 8, "int8 weights, one scale per output", quantize=int8.round_to_int8, kernels=_INT8
    ),
    QuantizationScheme(
        "int4", 4, "int4 weights, rounded to nearest, one scale per group of 64 inputs",
        quantize=nearest_int4.round_to_int4, kernels=_INT4,
    ),
    QuantizationScheme(
        "fp8", 8, "e4m3 weights, one scale per output; in a plain checkpoint only MLPs, without the first and the last "
        "block", quantize=fp8.round_to_float8, formats=("fp8",), kernels=_FP8, mlp_only=True,
    ),
    QuantizationScheme(
        "bitsandbytes", 8, "LLM.int8()", quantize=bnb.round_to_int8, kernels=_BNB, package="bitsandbytes",
        is_capturable=False,
    ),
    QuantizationScheme(
        "bitsandbytes-nf4", 4, "four-bit NormalFloat", quantize=bnb.round_to_nf4, kernels=_BNB, package="bitsandbytes"
    ),
    QuantizationScheme(
        "bitsandbytes-fp4", 4, "four-bit float", quantize=bnb.round_to_fp4, kernels=_BNB, package="bitsandbytes"
    ),
    QuantizationScheme("gptq", 4, "GPTQ checkpoints of 2, 4 or 8 bits", formats=("gptq", "awq"), kernels=_INT4),
    QuantizationScheme("awq", 4, "AWQ checkpoints (GEMM layout)", formats=("awq",), kernels=_INT4),
    QuantizationScheme(
        "marlin", 4, "GPTQ or AWQ checkpoints, with the fastest kernel of the device", formats=("gptq", "awq"),
        kernels=_INT4,
    ),
    QuantizationScheme(
        "compressed-tensors", 4, "compressed-tensors checkpoints: int4 and int8 in groups, int8, e4m3; the activation "
        "settings are not used", formats=("compressed-tensors",), kernels=("as gptq, eetq or fp8",) * 2,
    ),
    QuantizationScheme(
        "exl2", 4, "EXL2 checkpoints: groups of 2 to 8 bits", formats=("exl2",), kernels=_EXL2, is_capturable=False,
        is_sharded=False,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantization:
    """The method of a model, and the format of its checkpoint; `form` is None for a plain checkpoint."""

    scheme: QuantizationScheme
    form: Format | None

    @property
    def bits(self) -> float:
        """Bits per weight, without scales."""
        return self.scheme.bits if self.form is None else self.form.bits

    def excluded(self, num_layers: int) -> re.Pattern[str]:
        """Pattern of the linears in a plain checkpoint that are not quantized."""
        if self.form is not None or not self.scheme.mlp_only:
            return NO_NAME
        return re.compile(rf"{ATTENTION}|\.(0|{num_layers - 1})\.")


def choose(
    name: str | None, config: Mapping[str, Any], directory: Path, *, tier: Tier, device: torch.device, dummy: bool
) -> Quantization | None:
    """The method from `--quantize` and a raw `config.json`; None if neither names one.

    Raises UnsupportedError for an impossible combination, with a method that works.
    """
    form = None if dummy else find_format(config, directory)
    if name is None and form is None:
        return None
    scheme = find(form.name) if name is None and form is not None else find(name or "")
    _check(scheme, form)
    if tier == "recurrent":
        raise UnsupportedError(f"`--quantize {scheme.name}` is not supported for recurrent models: remove it")
    if device.type not in scheme.devices:
        raise UnsupportedError(f"`--quantize {scheme.name}` does not run on {device.type}")
    if scheme.package is not None and importlib.util.find_spec(scheme.package) is None:
        raise UnsupportedError(
            f"`--quantize {scheme.name}` needs {scheme.package}: pip install 'tgi-bench[quantization]', or use "
            "eetq, int4 or fp8"
        )
    return Quantization(scheme, form)


def find(name: str) -> QuantizationScheme:
    """The scheme of a value of `--quantize`."""
    return next(scheme for scheme in SCHEMES if scheme.name == name)


def _check(scheme: QuantizationScheme, form: Format | None) -> None:
    if form is None and scheme.quantize is None:
        hint = "; `text-generation-server quantize` makes one" if scheme.name in ("gptq", "marlin") else ""
        raise UnsupportedError(
            f"`--quantize {scheme.name}` needs a checkpoint that is quantized with it, and this one is plain{hint}; "
            f"{_FOR_PLAIN}"
        )
    if form is not None and form.name not in scheme.formats:
        raise UnsupportedError(
            f"`--quantize {scheme.name}` does not work with a checkpoint that is quantized with {form.name}: remove it"
        )
