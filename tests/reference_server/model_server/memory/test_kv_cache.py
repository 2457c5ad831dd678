"""The K/V cache's memory: shapes, zeros, and nothing committed before it is written."""

import resource

import numpy as np
import pytest
import torch

from reference_server.model_server.memory.kv_cache import KVCache, LayerShape, blocks_for, bytes_per_block


def test_layers_have_their_own_shapes_and_start_at_zero() -> None:
    cache = KVCache([LayerShape(2, 8), LayerShape(1, 4)], 3, 16, torch.bfloat16, torch.device("cpu"))

    assert [tuple(layer.buffer.shape) for layer in cache.layers] == [(3, 2, 2, 16, 8), (3, 2, 1, 16, 4)]
    assert all(not layer.buffer.any() and layer.buffer.dtype == torch.bfloat16 for layer in cache.layers)
    assert all(layer.buffer.data_ptr() % 64 == 0 for layer in cache.layers)
    assert cache.num_slots == 48


def test_bytes_per_block_counts_keys_and_values_of_all_layers() -> None:
    shapes = [LayerShape(2, 8), LayerShape(1, 4)]

    assert bytes_per_block(shapes, 16, torch.bfloat16) == 16 * 2 * (2 * 8 + 4) * 2


def test_an_eight_bit_block_takes_a_quarter_of_the_bytes_of_float32() -> None:
    shapes = [LayerShape(2, 8)]

    assert [bytes_per_block(shapes, 16, dtype) for dtype in (torch.float32, torch.float8_e5m2)] == [2048, 512]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_nonfinite_elements_become_zero_in_the_named_blocks(dtype: torch.dtype) -> None:
    cache = KVCache([LayerShape(1, 4)], 3, 16, dtype, torch.device("cpu"))
    buffer = cache.layers[0].buffer
    buffer.copy_(torch.full(buffer.shape, 1.5))
    buffer[1:, 0, 0, 0, 0] = torch.tensor(torch.nan).to(dtype)

    cache.zero_nonfinite(np.array([0, 1]))

    wide = buffer.float()
    assert wide[1, 0, 0, 0].tolist() == [0.0, 1.5, 1.5, 1.5]
    assert wide[2, 0, 0, 0, 0].isnan()
    assert bool((wide[0] == 1.5).all())


def test_a_large_cache_takes_no_memory_until_it_is_written() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    cache = KVCache([LayerShape(8, 128)], 1 << 14, 16, torch.bfloat16, torch.device("cpu"))

    assert cache.layers[0].buffer.nbytes == 1 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks
