"""The memory of a configuration's model in a container, from its config.json on this machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.errors import ModelSizeError
from tuner.servers.exported_container import ModelMemory
from tuner.servers.tgi.model_fit import read_config, size_of
from tuner.servers.tgi.weight_methods import METHODS, methods_of


def memory_of(settings: Mapping[str, Any], *, has_gpus: bool) -> ModelMemory | None:
    """Weights and, without GPUs, the K/V of `max_batch_total_tokens`. None if the model is not on this machine."""
    model, revision = str(settings.get("model_id", "")), settings.get("revision")
    if not _is_here(model, revision):
        return None
    try:
        config = read_config(model, {}, revision)
        size = size_of(config)
        methods = {method.name: method for method in methods_of(config)}
    except ModelSizeError:
        return None
    method = methods.get(str(settings.get("quantize")), next(iter(methods.values()), METHODS[0]))
    kv_tokens = 0 if has_gpus else int(settings.get("max_batch_total_tokens", 0))
    has_float8 = str(settings.get("kv_cache_dtype") or "").startswith("fp8")
    return ModelMemory(size.weight_bytes(method), kv_tokens * size.kv_bytes_per_token(has_float8=has_float8))


def _is_here(model: str, revision: str | None) -> bool:
    """Whether the config.json is in a directory or in the hub's cache: an export makes no request."""
    if Path(model, "config.json").is_file():
        return True
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return False
    try:
        return isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str)
    except HFValidationError:
        return False
