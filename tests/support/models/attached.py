"""A tiny model with our attention attached to a small cache."""

import torch
from transformers import PreTrainedModel

from reference_server.model_server.attention import select
from reference_server.model_server.memory.kv_cache import KVCache
from reference_server.model_server.models import hooks
from reference_server.model_server.models.families import find_family
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.step_state import StepState


def attach(model: PreTrainedModel, dtype: torch.dtype, num_blocks: int = 8) -> StepState:
    """Give every attention module of the model its place in a new cache, which the returned state holds."""
    hooks.register()
    model.config._attn_implementation = hooks.ATTENTION_NAME
    shim = find_family(model.config.to_dict()).shim
    if shim is not None:
        shim(model)
    layers = hooks.probe(model)
    choice = select.choose(EngineOptions("tiny"), hooks.needs_of(layers, torch.device("cpu"), dtype))
    state = StepState()
    state.cache = KVCache([layer.shape for layer in layers], num_blocks, 16, dtype, torch.device("cpu"))
    hooks.attach(layers, state, choice)
    return state
