"""What differs between the supported Transformers releases (5.17 to 5.23). The other files ask this one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig, initialization
from transformers.utils import logging as transformers_logging


def quiet() -> None:
    """No progress bars: they would be lines of noise in the log of a server."""
    transformers_logging.disable_progress_bar()


@contextmanager
def without_weight_init() -> Iterator[None]:
    """Build modules whose parameters are left as allocated; buffers are computed as always."""
    with initialization.no_init_weights():
        yield


def tensor_parallel_arguments(world_size: int) -> dict[str, Any]:
    """Keywords of `from_pretrained` that shard a model by its own plan over `world_size` ranks."""
    try:
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_size=world_size, tp_plan="auto")
    except (ImportError, TypeError):
        return {"tp_plan": "auto"}
    return {"distributed_config": config}


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The rope dictionary of a config; empty for a model without rotary positions."""
    return dict(getattr(config, "rope_parameters", None) or {})
