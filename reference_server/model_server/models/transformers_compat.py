"""What differs between the supported Transformers releases (5.17 to 5.23). The other files ask this one."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig, initialization
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging


def quiet() -> None:
    """No progress bars: they would be lines of noise in the log of a server."""
    transformers_logging.disable_progress_bar()


@contextmanager
def without_weight_init() -> Iterator[None]:
    """Build modules whose parameters are left as allocated; buffers are computed as always."""
    with initialization.no_init_weights():
        yield


def tensor_parallel_plan(model: Any) -> dict[str, str]:
    """Module pattern -> style, with full names; empty for a class without a plan.

    The config's plan counts for the base model only, whose prefix its patterns lack; the class's own, for the head.
    """
    base = getattr(model.config, "base_model_tp_plan", None)
    if not base:
        return {}
    prefix = model.base_model_prefix
    return {f"{prefix}.{pattern}": style for pattern, style in base.items()} | dict(type(model)._tp_plan or {})


def causal_model_types() -> Collection[str]:
    """Model types that `AutoModelForCausalLM` knows."""
    return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()  # type: ignore[no-any-return]


def seq2seq_model_types() -> Collection[str]:
    """Model types that `AutoModelForSeq2SeqLM` knows."""
    return modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys()  # type: ignore[no-any-return]


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The rope dictionary of a config; empty for a model without rotary positions."""
    return dict(getattr(config, "rope_parameters", None) or {})
