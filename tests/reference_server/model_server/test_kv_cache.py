"""The K/V cache's memory: shapes, zeros, and nothing committed before it is written."""

import resource

import pytest
import torch

from reference_server.model_server.kv_cache import KVCache, LayerShape, blocks_for, bytes_per_block


def test_layers_have_their_own_shapes_and_start_at_zero() -> None:
    cache = KVCache([LayerShape(2, 8), LayerShape(1, 4)], 3, 16, torch.bfloat16, torch.device("cpu"))

    assert [tuple(layer.buffer.shape) for layer in cache.layers] == [(3, 2, 2, 16, 8), (3, 2, 1, 16, 4)]
    assert all(not layer.buffer.any() and layer.buffer.dtype == torch.bfloat16 for layer in cache.layers)
    assert all(layer.buffer.data_ptr() % 64 == 0 for layer in cache.layers)
    assert cache.num_slots == 48


def test_bytes_per_block_counts_keys_and_values_of_all_layers() -> None:
    shapes = [LayerShape(2, 8), LayerShape(1, 4)]

    assert bytes_per_block(shapes, 16, torch.bfloat16) == 16 * 2 * (2 * 8 + 4) * 2


def test_a_large_cache_takes_no_memory_until_it_is_written() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    cache = KVCache([LayerShape(8, 128)], 1 << 14, 16, torch.bfloat16, torch.device("cpu"))

    assert cache.layers[0].buffer.nbytes == 1 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks
