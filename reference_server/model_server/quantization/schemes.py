"""The quantization methods: what each needs, where it runs, and which one a model is served with."""

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
from reference_server.model_server.quantization import bnb, fp8, int8
from reference_server.model_server.quantization.formats import Format, find_format
from reference_server.model_server.quantization.linear import Product

NOTHING = re.compile(r"(?!)")
ATTENTION = r"(^|\.)(self_attn|attn|attention|self_attention|SelfAttention|EncDecAttention|encoder_attn)\."


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """One value of `--quantize`.

    quantize: makes a plain weight [outputs, inputs] a product; None for a method whose checkpoints are prepared.
    formats: the checkpoints it serves. keeps_ends: leave the attention and the first and last block as they are.
    package: a library that is needed, of the extra `quantization`. is_capturable: steps may become CUDA graphs.
    is_sharded: weights may be divided over shards.
    """

    name: str
    bits: float
    meaning: str
    quantize: Callable[[Tensor], Product] | None = None
    formats: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    kernels: tuple[str, str] = ("", "")
    keeps_ends: bool = False
    package: str | None = None
    is_capturable: bool = True
    is_sharded: bool = True


_ON_ANY = "on any checkpoint: eetq, fp8, bitsandbytes, bitsandbytes-nf4, bitsandbytes-fp4"
_INT4 = ("torch's int4 product in bfloat16, else dequantized", "torch's int4 product in bfloat16, else dequantized")
_INT8 = ("torch's int8 product for few rows in bfloat16, else dequantized",) * 2
_FP8 = ("weights widened for each product", "`_scaled_mm` from capability 8.9 on, else weights widened")
_BNB = ("bitsandbytes", "bitsandbytes")
_EXL2 = ("weights widened for each product: less memory, less speed",) * 2

SCHEMES = (
    QuantizationScheme(
        "eetq", 8, "int8 weights, one scale for each output", quantize=int8.round_to_int8, kernels=_INT8
    ),
    QuantizationScheme(
        "fp8", 8, "e4m3 weights, one scale for each output; on a plain checkpoint those of the MLPs, the first and the "
        "last block's aside", quantize=fp8.round_to_float8, formats=("fp8",), kernels=_FP8, keeps_ends=True,
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
        "marlin", 4, "GPTQ or AWQ checkpoints, by the fastest kernel of the device", formats=("gptq", "awq"),
        kernels=_INT4,
    ),
    QuantizationScheme(
        "compressed-tensors", 4, "compressed-tensors checkpoints: int4 and int8 in groups, int8, e4m3; inputs stay as "
        "they are", formats=("compressed-tensors",), kernels=("as gptq, eetq or fp8", "as gptq, eetq or fp8"),
    ),
    QuantizationScheme(
        "exl2", 4, "EXL2 checkpoints: groups of 2 to 8 bits", formats=("exl2",), kernels=_EXL2, is_capturable=False,
        is_sharded=False,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantization:
    """The method that a model is served with; `form` is how its checkpoint stores the weights, None if plainly."""

    scheme: QuantizationScheme
    form: Format | None

    @property
    def bits(self) -> float:
        """Bits of a weight, scales aside."""
        return self.scheme.bits if self.form is None else self.form.bits

    def kept(self, num_layers: int) -> re.Pattern[str]:
        """Names of linears that stay as they are when a plain checkpoint is quantized."""
        if self.form is not None or not self.scheme.keeps_ends:
            return NOTHING
        return re.compile(rf"{ATTENTION}|\.(0|{num_layers - 1})\.")


def choose(
    name: str | None, config: Mapping[str, Any], directory: Path, *, tier: Tier, device: torch.device, dummy: bool
) -> Quantization | None:
    """What `--quantize` and a raw `config.json` say together; None for neither.

    Raises UnsupportedError naming the method, for what cannot be, and what would work.
    """
    form = None if dummy else find_format(config, directory)
    if name is None and form is None:
        return None
    scheme = _of_format(form) if name is None and form is not None else find(name or "")
    _check(scheme, form)
    if tier == "recurrent":
        raise UnsupportedError(f"`--quantize {scheme.name}` is not served for recurrent models: leave it out")
    if device.type not in scheme.devices:
        raise UnsupportedError(f"`--quantize {scheme.name}` does not run on {device.type}")
    if scheme.package is not None and importlib.util.find_spec(scheme.package) is None:
        raise UnsupportedError(
            f"`--quantize {scheme.name}` needs {scheme.package}: pip install 'tgi-bench[quantization]', or take "
            "eetq or fp8"
        )
    return Quantization(scheme, form)


def find(name: str) -> QuantizationScheme:
    """The scheme of a value of `--quantize`."""
    return next(scheme for scheme in SCHEMES if scheme.name == name)


def _of_format(form: Format) -> QuantizationScheme:
    return find(form.name)


def _check(scheme: QuantizationScheme, form: Format | None) -> None:
    if form is None and scheme.quantize is None:
        made = "; `text-generation-server quantize` makes one" if scheme.name in ("gptq", "marlin") else ""
        raise UnsupportedError(
            f"`--quantize {scheme.name}` needs a checkpoint that is quantized so, and this one is plain{made}. What "
            f"works {_ON_ANY}"
        )
    if form is not None and form.name not in scheme.formats:
        raise UnsupportedError(
            f"`--quantize {scheme.name}` cannot be had on a checkpoint that is quantized with {form.name} already: "
            "leave it out"
        )
