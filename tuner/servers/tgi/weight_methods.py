"""The values of `--quantize` with the bits of a stored weight, to compute sizes without torch.

A test compares them with the bytes of weights that the model server quantized.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuner.errors import ModelSizeError

PLAIN = "none"
ANY_CHECKPOINT = "any unquantized checkpoint"
# A scale and a zero point of two bytes each for every group.
BITS_PER_GROUP = 32
GROUP_SIZE = 128
# Bits per weight of bitsandbytes' nested scales: one byte for 64 weights, and four bytes for 256 of these bytes.
NESTED_SCALES = 8 / 64 + 32 / (64 * 256)


@dataclass(frozen=True, slots=True)
class WeightMethod:
    """One value of `--quantize`.

    bits: bits of a quantized weight including scales; None for the compute type. checkpoint: supported checkpoints.
    mlp_only: attention, the first and the last layer stay in the compute type. is_sharded: several GPUs can share the
    weights.
    """

    name: str
    bits: float | None
    checkpoint: str
    mlp_only: bool = False
    is_sharded: bool = True


_INT4 = 4 + BITS_PER_GROUP / GROUP_SIZE
# Rounded at load: a scale of two bytes for 64 weights, no zero points.
_NEAREST_INT4 = 4 + 16 / 64

METHODS = (
    WeightMethod(PLAIN, None, ANY_CHECKPOINT),
    WeightMethod("eetq", 8, ANY_CHECKPOINT),
    WeightMethod("int4", _NEAREST_INT4, f"{ANY_CHECKPOINT}; bundled server only"),
    WeightMethod("fp8", 8, f"{ANY_CHECKPOINT}; MLPs only", mlp_only=True),
    WeightMethod("bitsandbytes", 8, ANY_CHECKPOINT),
    WeightMethod("bitsandbytes-nf4", 4 + NESTED_SCALES, ANY_CHECKPOINT),
    WeightMethod("bitsandbytes-fp4", 4 + NESTED_SCALES, ANY_CHECKPOINT),
    WeightMethod("gptq", _INT4, "GPTQ or AWQ, 4 bits"),
    WeightMethod("awq", _INT4, "AWQ, 4 bits"),
    WeightMethod("marlin", _INT4, "GPTQ or AWQ, 4 bits"),
    WeightMethod("compressed-tensors", _INT4, "compressed-tensors, 4 bits"),
    WeightMethod("exl2", 4 + 4 / 32, "EXL2, 4 bits", is_sharded=False),
)


def methods_of(config: Mapping[str, Any]) -> tuple[WeightMethod, ...]:
    """The methods for a model: all methods if it is not quantized, else the method of its checkpoint.

    Raises ModelSizeError for an unknown kind of checkpoint.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return METHODS
    name = settings.get("quant_method")
    found = next((method for method in METHODS if method.name == name and name != PLAIN), None)
    if found is None or found.bits is None:
        known = ", ".join(method.name for method in METHODS[1:])
        raise ModelSizeError(f"the checkpoint's `quant_method` is {name!r:.40}, but must be one of {known}")
    return (replace(found, bits=_stored_bits(found, settings), mlp_only=False, checkpoint="this checkpoint"),)


def _stored_bits(method: WeightMethod, settings: Mapping[str, Any]) -> float | None:
    """Bits of a weight in a checkpoint. A group size of -1 means one group per output; its scale is negligible."""
    if method.name == "compressed-tensors":
        groups = settings.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        settings = first.get("weights") or {} if isinstance(first, Mapping) else {}
    bits = settings.get("num_bits") or settings.get("bits")
    if not isinstance(bits, int | float):
        return method.bits
    if method.name == "exl2":
        return bits + 4 / 32
    group = settings.get("group_size")
    return bits + (BITS_PER_GROUP / group if isinstance(group, int) and group > 0 else 0)
