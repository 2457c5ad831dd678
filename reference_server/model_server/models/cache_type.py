"""The element type of a model's K/V cache and its scales: from `--kv-cache-dtype`, the config and the checkpoint."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from reference_server.model_server.memory import float8
from reference_server.model_server.memory.kv_cache import UNSCALED, KVScales
from reference_server.model_server.models.kv_scales import ReadableWeights, is_scale, read_scales
from reference_server.model_server.options import EngineOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheType:
    """float8: an eight-bit type; None is the compute type. scales: of the attention modules that have some."""

    float8: torch.dtype | None = None
    scales: Mapping[nn.Module, KVScales] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        raw: Mapping[str, Any],
        device: torch.device,
        model: Any,
        checkpoint: ReadableWeights | None,
    ) -> "CacheType":
        """raw: the model's config.json. checkpoint: None for random weights."""
        found = _float8_of(options, raw, device)
        return cls(found, {} if checkpoint is None else _scales_of(model, checkpoint, found))

    def dtype(self, compute_type: torch.dtype) -> torch.dtype:
        """The type of the cache's elements."""
        return self.float8 or compute_type

    def scales_in_order(self, modules: Iterable[nn.Module]) -> tuple[KVScales, ...]:
        """The scales of the layers with these attention modules; warns if some are missing for e4m3."""
        found = [self.scales.get(module, UNSCALED) for module in modules]
        missing = len(found) - len(self.scales)
        if self.float8 == torch.float8_e4m3fn and missing:
            logger.warning(
                "the checkpoint has no K/V scales (k_scale and v_scale, or kv_scale) for %d of %d layers: they are 1, "
                "and keys and values beyond 448 become 448",
                *(missing, len(found)),
            )
        return tuple(found)


def _float8_of(options: EngineOptions, raw: Mapping[str, Any], device: torch.device) -> torch.dtype | None:
    """As in TGI, a compressed-tensors checkpoint that was calibrated for it selects e4m3 with flashinfer on CUDA."""
    if options.kv_cache_dtype is not None:
        return float8.FLOAT8_TYPES[options.kv_cache_dtype]
    quantization = raw.get("quantization_config") or raw.get("compression_config") or {}
    scheme = quantization.get("kv_cache_scheme") or {}
    is_float8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    if is_float8 and device.type == "cuda" and options.attention == "flashinfer":
        logger.info("the K/V cache has type fp8_e4m3fn: the checkpoint's `kv_cache_scheme` is of 8-bit floats")
        return torch.float8_e4m3fn
    return None


def _scales_of(model: Any, checkpoint: ReadableWeights, dtype: torch.dtype | None) -> dict[nn.Module, KVScales]:
    """As in TGI, only e4m3 is scaled: e5m2 has the range of float16."""
    if dtype == torch.float8_e5m2 and any(map(is_scale, checkpoint.shapes)):
        logger.info("the K/V scales of the checkpoint are not used: fp8_e5m2 is not scaled")
    if dtype != torch.float8_e4m3fn:
        return {}
    modules = {name: each for name, each in model.named_modules() if getattr(each, "layer_idx", None) is not None}
    return {modules[name]: scales for name, scales in read_scales(checkpoint, modules, model.base_model_prefix).items()}
