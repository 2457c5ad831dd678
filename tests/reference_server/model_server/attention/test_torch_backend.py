"""The paged torch kernels against dense attention in float64, over block tables in random order."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from reference_server.model_server.attention import torch_backend
from reference_server.model_server.attention.backend import (
    BACKENDS,
    AttentionBackend,
    AttentionChoice,
    AttentionNeeds,
)
from reference_server.model_server.attention.paged import PagedLayer
from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions, AttentionState
from reference_server.model_server.kv_cache import KVCache, LayerShape

HEAD_DIM = 24
DECODES = [(1, 1), (1, 17), (1, 40)]
# The last one is longer than the rows of a mask.
PREFILLS = [(4, 4), (20, 20), (5, 33), (2, 16), (280, 290)]


@dataclass(frozen=True)
class Case:
    """Attention options in the shape that the dense reference takes."""

    num_heads: int = 4
    num_kv_heads: int = 4
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    block_size: int = 16


CASES = {
    "plain": Case(),
    "grouped": Case(num_kv_heads=2),
    "multi-query": Case(num_kv_heads=1),
    "window": Case(window=6, num_kv_heads=2),
    "softcap": Case(softcap=1.5),
    "softcap, grouped, window": Case(softcap=1.5, num_kv_heads=2, window=6),
    "alibi": Case(alibi=True),
    "page of one": Case(block_size=1),
    "page of 256": Case(block_size=256, num_kv_heads=2),
}


def dense(query: Tensor, keys: Tensor, values: Tensor, case: Case, slopes: Tensor | None) -> Tensor:
    """query: [seqlen_q, num_heads, head_dim] at the end of keys, values: [seqlen_k, num_kv_heads, head_dim]."""
    group = case.num_heads // case.num_kv_heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * HEAD_DIM**-0.5
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    distance = torch.arange(len(keys))[None] - torch.arange(len(keys) - len(query), len(keys))[:, None]
    if slopes is not None:
        scores = scores + slopes.double().view(-1, 1, 1) * distance
    hidden = distance > 0
    if case.window is not None:
        hidden |= distance <= -case.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("rows", [DECODES, PREFILLS, [*DECODES, *PREFILLS]], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_paged_attention_equals_dense_attention(
    case: Case, rows: list[tuple[int, int]], backend: AttentionBackend
) -> None:
    needs = AttentionNeeds(
        *("cpu", torch.float32, frozenset({HEAD_DIM})),
        has_window=case.window is not None,
        has_softcap=case.softcap is not None,
        has_alibi=case.alibi,
    )
    if not (backend.prefill.supports(needs) and backend.decode.supports(needs)):
        pytest.skip(f"{backend.name} does not offer {needs}")
    generator = torch.Generator().manual_seed(7)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if case.alibi else None
    lengths = [seqlen_k for _, seqlen_k in rows]
    keys_values = [torch.randn((n, 2, case.num_kv_heads, HEAD_DIM), generator=generator) for n in lengths]
    queries = [torch.randn((n, case.num_heads, HEAD_DIM), generator=generator) for n, _ in rows]
    table, num_blocks = shuffled_table(lengths, case.block_size)
    layer = paged_layer(case, num_blocks, backend, slopes)

    for seen in (True, False):
        # First the tokens that earlier steps have stored, then the step under test.
        spans = [(0, k - q) if seen else (k - q, k) for q, k in rows]
        taken = [(index, span) for index, span in enumerate(spans) if span[0] < span[1]]
        if not taken:
            continue
        taken.sort(key=lambda item: item[1][1] - item[1][0] > 1)
        step = [item[0] for item in taken]
        metadata = metadata_of(table[step], [span for _, span in taken], case.block_size)
        key_value = torch.cat([keys_values[index][first:last] for index, (first, last) in taken])
        query = torch.cat([torch.zeros(e - s, case.num_heads, HEAD_DIM) if seen else queries[i] for i, (s, e) in taken])
        with layer.state.use(metadata):
            output = layer(query, key_value)

    expected = [
        dense(query.double(), kv[:, 0].double(), kv[:, 1].double(), case, slopes)
        for query, kv in ((queries[index], keys_values[index]) for index in step)
    ]
    torch.testing.assert_close(output.double(), torch.cat(expected), atol=2e-6, rtol=2e-5)


def shuffled_table(lengths: list[int], block_size: int) -> tuple[np.ndarray, int]:
    blocks = [-(-length // block_size) for length in lengths]
    order = iter(np.random.default_rng(3).permutation(sum(blocks)) + 1)
    table = np.zeros((len(lengths), max(blocks)), dtype=np.int64)
    for row, count in zip(table, blocks, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    return table, sum(blocks) + 1


def metadata_of(table: np.ndarray, spans: list[tuple[int, int]], block_size: int) -> AttentionMetadata:
    slots = [
        row[position // block_size] * block_size + position % block_size
        for row, (first, last) in zip(table, spans, strict=True)
        for position in range(first, last)
    ]
    seqlen_q = np.array([last - first for first, last in spans], dtype=np.int64)
    return AttentionMetadata(
        slots=np.array(slots, dtype=np.int64),
        block_table=table,
        seqlen_q=seqlen_q,
        seqlen_k=np.array([last for _, last in spans], dtype=np.int64),
        num_decode_rows=int((seqlen_q == 1).sum()),
    )


def paged_layer(case: Case, num_blocks: int, backend: AttentionBackend, slopes: Tensor | None) -> PagedLayer:
    state = AttentionState()
    shape = LayerShape(case.num_kv_heads, HEAD_DIM)
    state.cache = KVCache([shape], num_blocks, case.block_size, torch.float32, torch.device("cpu"))
    # What no row owns must never be read.
    state.cache.layers[0].fill_(1e9)
    choice = AttentionChoice(backend.prefill, backend.decode, case.block_size, backend.name, "test")
    options = AttentionOptions(HEAD_DIM**-0.5, case.window, case.softcap, slopes)
    return PagedLayer(state, 0, choice, options)


def test_decode_in_many_tiles_equals_decode_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    case, lengths = Case(num_kv_heads=2), [40, 3, 17, 1, 90]
    table, num_blocks = shuffled_table(lengths, case.block_size)
    layer = paged_layer(case, num_blocks, BACKENDS[-1], None)
    assert layer.state.cache is not None
    cache = layer.state.cache.layers[0]
    cache.copy_(torch.randn(cache.shape, generator=generator))
    query = torch.randn(len(lengths), case.num_heads, HEAD_DIM, generator=generator)
    key_value = torch.randn(len(lengths), 2, case.num_kv_heads, HEAD_DIM, generator=generator)
    outputs = []

    for tile_bytes in (torch_backend.TILE_BYTES, 1):
        monkeypatch.setattr(torch_backend, "TILE_BYTES", tile_bytes)
        with layer.state.use(metadata_of(table, [(length - 1, length) for length in lengths], case.block_size)):
            outputs.append(layer(query, key_value))

    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-6)
