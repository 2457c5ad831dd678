"""Every preset's packed forward on the meta device: shapes of logits and caches at full size, without memory."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from reference_server.model_server.attention import select
from reference_server.model_server.attention.conformance import metadata_of
from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.memory.kv_cache import KVCache, bytes_per_block
from reference_server.model_server.models import hooks, loader, transformers_compat
from reference_server.model_server.models.families import find_family
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.step_state import StepState
from reference_server.presets.catalog import PRESETS
from tests.support.models.devices.table_attention import TABLES

META = torch.device("meta")
BLOCKS, BLOCK_SIZE = 8, 16
# Their layers are those of smaller presets, and BLOOM's those of `test_families.py`.
SLOW = ("bloom-560m", "llama-3.1-8b", "qwen2.5-7b", "llama-3.2-1b")
# Bytes of K/V a token, as the presets' shapes say.
BYTES_PER_TOKEN = {
    "tiny-llama": 2 * 4 * 2 * 32 * 2,
    "llama-125m": 2 * 12 * 12 * 64 * 2,
    "bloom-560m": 96 << 10,
    "llama-3.2-1b": 32 << 10,
    "llama-3.1-8b": 128 << 10,
    "qwen2.5-7b": 56 << 10,
}


def packed(spans: SequenceOf[tuple[int, int]]) -> RaggedInputs:
    """A step of rows at these spans of positions, one token first; only the last token of each gives logits."""
    table = np.arange(1, 2 * len(spans) + 1, dtype=np.int64).reshape(len(spans), 2)
    metadata = metadata_of(table, spans, BLOCK_SIZE)
    positions = np.concatenate([np.arange(first, last) for first, last in spans])
    is_decode = metadata.num_single_rows == metadata.num_rows
    return RaggedInputs(
        input_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        logits_index=None if is_decode else np.cumsum(metadata.seqlen_q) - 1,
        sampled=(),
        spans=(),
        metadata=metadata,
    )


@pytest.mark.parametrize(
    "preset",
    [pytest.param(preset, id=preset.name, marks=pytest.mark.slow if preset.name in SLOW else ()) for preset in PRESETS],
)
def test_shapes_of_logits_and_caches_at_full_size(preset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", (TABLES,))
    hooks.register()
    config = AutoConfig.from_pretrained(preset.directory)
    family = find_family(config.to_dict())
    files = loader.locate(EngineOptions(f"preset:{preset.name}"))
    model_class = loader.model_class_of(config, files, family, family.tier)
    model = transformers_compat.build_empty(model_class, config, torch.bfloat16).to(META).eval()
    model.config._attn_implementation = hooks.ATTENTION_NAME
    if family.shim is not None:
        family.shim(model)

    layers = hooks.probe(model)
    choice = select.choose(EngineOptions("model"), hooks.needs_of(layers, META, torch.bfloat16))
    state = StepState()
    hooks.attach(layers, state, choice)
    shapes = [layer.shape for layer in layers]
    state.cache = KVCache(shapes, BLOCKS, BLOCK_SIZE, torch.bfloat16, META)
    forward = RaggedForward(model, state, META, None)
    with torch.inference_mode():
        decoded = forward(packed([(9, 10), (0, 1), (20, 21)]))
        mixed = forward(packed([(9, 10), (0, 20), (16, 21)]))

    assert bytes_per_block(shapes, BLOCK_SIZE, torch.bfloat16) == BYTES_PER_TOKEN[preset.name] * BLOCK_SIZE
    assert {layer.buffer.shape[0] for layer in state.cache.layers} == {BLOCKS}
    for logits in (decoded, mixed):
        assert (logits.shape, logits.dtype, logits.device.type) == ((3, config.vocab_size), torch.bfloat16, "meta")
