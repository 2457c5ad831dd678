"""Formats of quantized checkpoints: finds the format in the config, and refuses unsupported variants."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from reference_server.errors import UnsupportedError
from reference_server.json_files import read_json
from reference_server.model_server.quantization.linear import QuantizedWeight
from reference_server.model_server.quantization.stored_weights import AWQ, BITS, EXL2, GPTQ, CompressedTensors, Float8
from reference_server.model_server.weights.checkpoint import Checkpoint
from reference_server.model_server.weights.cut import Cut

SUPPORTED_STATUSES = ("compressed", "frozen")
# TGI's own tool stores these among the weights. `gptq_bits` overrides the config; the rest is implied by the shapes.
GPTQ_LABELS = ("gptq_bits", "gptq_groupsize", "gptq_sym")
CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


class Format(Protocol):
    """The way a kind of checkpoint stores a linear."""

    @property
    def name(self) -> str:
        """The name in the config."""
        ...

    @property
    def bits(self) -> float:
        """Bits per weight."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Names of tensors that only a quantized linear has."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all tensors of a quantized linear."""
        ...

    def read(self, checkpoint: Checkpoint, prefix: str, cut: Cut | None) -> QuantizedWeight:
        """The weight of the linear `prefix`, or the part `cut` of [outputs, inputs]."""
        ...

    def shape(self, checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
        """Outputs, inputs of the linear `prefix`."""
        ...


def find_format(config: Mapping[str, Any], directory: Path) -> Format | None:
    """The format in a raw `config.json`, or in a file of older tools in the same folder. None for a plain checkpoint.

    Raises UnsupportedError for an unknown format or an unsupported variant.
    """
    settings = config.get("quantization_config") or config.get("compression_config") or _legacy_settings(directory)
    if settings is None:
        return None
    method = settings.get("quant_method") or _legacy_method(settings)
    match method:
        case "gptq":
            _check_bits(settings, BITS)
            layout = settings.get("checkpoint_format") or "gptq"
            if layout not in ("gptq", "gptq_v2"):
                raise UnsupportedError(f"GPTQ weights in the {layout!r} layout are not supported: save them as 'gptq'")
            return GPTQ(_bits(settings), zero_offset=0 if layout == "gptq_v2" else 1)
        case "awq":
            _check_bits(settings, (4,))
            layout = str(settings.get("version") or settings.get("format") or "gemm").lower()
            if layout != "gemm":
                raise UnsupportedError(f"AWQ weights in the {layout!r} layout are not supported: save them as 'gemm'")
            return AWQ()
        case "fp8" | "fbgemm_fp8":
            _check_blocks(settings.get("weight_block_size"))
            return Float8()
        case "exl2":
            return EXL2(float(settings.get("bits") or 4))
        case "compressed-tensors":
            return _compressed_tensors(settings)
    raise UnsupportedError(
        f"the checkpoint is quantized with {method!r}, which is not supported; supported are gptq, awq, fp8, exl2 and "
        "compressed-tensors, and plain checkpoints with `--quantize`"
    )


def with_stored_bits(form: Format, checkpoint: Checkpoint) -> Format:
    """The format, with the bits stored among the weights, if any."""
    if not isinstance(form, GPTQ) or "gptq_bits" not in checkpoint.shapes:
        return form
    bits = int(checkpoint.read("gptq_bits").item())
    _check_bits({"bits": bits}, BITS)
    return replace(form, bits=bits)


def _legacy_settings(directory: Path) -> dict[str, Any] | None:
    """Settings that AutoGPTQ and AutoAWQ wrote before Transformers supported them."""
    for name in ("quantize_config.json", "quant_config.json"):
        path = directory / name
        if path.is_file():
            return read_json(path)
    return None


def _legacy_method(settings: Mapping[str, Any]) -> str:
    return "awq" if "w_bit" in settings else "gptq" if "bits" in settings else "unknown"


def _bits(settings: Mapping[str, Any]) -> int:
    return int(settings.get("bits") or settings.get("w_bit") or 4)


def _check_bits(settings: Mapping[str, Any], supported: tuple[int, ...]) -> None:
    if _bits(settings) not in supported:
        raise UnsupportedError(
            f"weights of {_bits(settings)} bits are not supported: only of {', '.join(map(str, supported))}"
        )


def _check_blocks(sizes: Any) -> None:
    """The number of scales determines the size of a block only if it is a power of two."""
    for size in sizes if isinstance(sizes, list) else ():
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            raise UnsupportedError(f"blocks of {sizes} weights are not supported: their sizes must be powers of two")


def _compressed_tensors(settings: Mapping[str, Any]) -> CompressedTensors:
    status = settings.get("quantization_status", "compressed")
    if status not in SUPPORTED_STATUSES:
        raise UnsupportedError(
            f"the status of the compressed-tensors checkpoint is {status}, must be {' or '.join(SUPPORTED_STATUSES)}"
        )
    layout = settings.get("format", "dense")
    if layout not in CT_FORMATS:
        raise UnsupportedError(
            f"compressed-tensors weights in the {layout!r} format are not supported: only {', '.join(CT_FORMATS)}"
        )
    groups = settings.get("config_groups") or {}
    schemes = [group.get("weights") or {} for group in groups.values() if isinstance(group, dict)]
    bits = [int(scheme.get("num_bits", 8)) for scheme in schemes] or [8]
    if unsupported := sorted(set(bits) - set(BITS)):
        raise UnsupportedError(
            f"compressed-tensors weights of {unsupported[0]} bits are not supported: only of 2, 4, 8"
        )
    for scheme in schemes:
        _check_blocks(scheme.get("block_structure"))
    return CompressedTensors(min(bits))
