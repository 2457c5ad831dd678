"""The conformance suite of attention kernels: cases over block tables in random order, against dense float64.

Tests run it on a CPU, also with Triton's kernels in its interpreter; `measure` runs it on the measured device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.attention.kernel import (
    AttentionKernel,
    AttentionNeeds,
    AttentionOptions,
    CacheStore,
)
from reference_server.model_server.attention.paged import PagedLayer
from reference_server.model_server.attention.select import AttentionChoice
from reference_server.model_server.attention.staging import tensors_on
from reference_server.model_server.memory.kv_cache import UNSCALED, KVCache, KVScales, LayerShape
from reference_server.model_server.step_state import Step, StepMetadata, StepState, StepTensors

# For each row: number of new tokens, and number of tokens with K/V after the step.
Rows = Sequence[tuple[int, int]]
DECODES: Rows = [(1, 1), (1, 17), (1, 40)]
# The last row has more new tokens than `MASKED_QUERY_ROWS` of the torch kernel.
PREFILLS: Rows = [(4, 4), (20, 20), (5, 33), (2, 16), (280, 290)]
ROWS: Mapping[str, Rows] = {"decode": DECODES, "prefill": PREFILLS, "mixed": [*DECODES, *PREFILLS]}
# Initial value of the cache: a kernel that reads a block without an owner gives a wrong result.
POISON = 3e4


@dataclass(frozen=True, slots=True)
class ConformanceCase:
    """Options of a layer's attention, and the type and scales of its cache. cache_dtype: None is the compute type."""

    num_heads: int = 4
    num_kv_heads: int = 4
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    block_size: int = 16
    head_dim: int = 24
    cache_dtype: torch.dtype | None = None
    scales: KVScales = UNSCALED

    def needs(self, device: torch.device, dtype: torch.dtype) -> AttentionNeeds:
        return AttentionNeeds(
            *(device.type, dtype, frozenset({self.head_dim})),
            has_window=self.window is not None,
            has_softcap=self.softcap is not None,
            has_alibi=self.alibi,
            block_size=self.block_size,
            cache_dtype=self.cache_dtype,
        )

    def slopes(self) -> Tensor | None:
        return torch.tensor([0.5**head for head in range(1, self.num_heads + 1)]) if self.alibi else None

    def kept(self, key_value: Tensor) -> Tensor:
        """The keys and values [tokens, 2, ...] as read back from the cache, in float64."""
        if self.cache_dtype is None:
            return key_value.double()
        factors = torch.tensor([1 / self.scales.key, 1 / self.scales.value])[:, None, None]
        largest = torch.finfo(self.cache_dtype).max
        stored = (key_value.float() * factors).clamp(-largest, largest).to(self.cache_dtype)
        return stored.double() * torch.tensor([self.scales.key, self.scales.value]).double()[:, None, None]


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Some keys and values exceed the largest value of the type, so that they are clipped.
SCALES = KVScales(key=0.0061, value=0.37)
CASES: Mapping[str, ConformanceCase] = {
    "plain": ConformanceCase(),
    "grouped": ConformanceCase(num_kv_heads=2),
    "multi-query": ConformanceCase(num_kv_heads=1),
    "window": ConformanceCase(window=6, num_kv_heads=2),
    "softcap": ConformanceCase(softcap=1.5),
    "softcap, grouped, window": ConformanceCase(softcap=1.5, num_kv_heads=2, window=6),
    "alibi": ConformanceCase(alibi=True),
    "page of one": ConformanceCase(block_size=1),
    "page of 256": ConformanceCase(block_size=256, num_kv_heads=2),
    "e4m3": ConformanceCase(cache_dtype=E4M3, num_kv_heads=2),
    "e5m2": ConformanceCase(cache_dtype=E5M2, num_kv_heads=2),
    "e4m3, scaled, multi-query, page of 256": ConformanceCase(
        cache_dtype=E4M3, scales=SCALES, num_kv_heads=1, block_size=256
    ),
    "e4m3, scaled, softcap, grouped, window": ConformanceCase(
        cache_dtype=E4M3, scales=SCALES, softcap=1.5, num_kv_heads=2, window=6
    ),
    "e5m2, alibi, page of one": ConformanceCase(cache_dtype=E5M2, alibi=True, block_size=1),
}


@dataclass(frozen=True, slots=True)
class ConformanceResult:
    """A kernel's result and the dense one: [tokens, num_heads, head_dim], both in float64 on the host."""

    output: Tensor
    expected: Tensor

    @property
    def relative_error(self) -> float:
        """The norm of the difference over that of the expected; infinite where the output is not finite."""
        error = (self.output - self.expected).norm() / self.expected.norm()
        return float(error) if torch.isfinite(self.output).all() else float("inf")


def run(
    prefill: AttentionKernel,
    decode: AttentionKernel,
    store: CacheStore,
    case: ConformanceCase,
    rows: Rows,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
    make_tensors: Callable[[StepMetadata], StepTensors] | None = None,
) -> ConformanceResult:
    """Store the K/V of earlier steps, then attend the step under test.

    make_tensors: None makes the tensors that a model on this device uses.
    """
    make_tensors = make_tensors or partial(tensors_on, device)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    keys_values = [drawn(seqlen_k, 2, case.num_kv_heads, case.head_dim) for _, seqlen_k in rows]
    queries = [drawn(seqlen_q, case.num_heads, case.head_dim) for seqlen_q, _ in rows]
    table, num_blocks = shuffled_table([seqlen_k for _, seqlen_k in rows], case.block_size)
    layer = paged_layer(case, num_blocks, prefill, decode, store, device, dtype)
    before = [(index, (0, k - q)) for index, (q, k) in enumerate(rows) if k > q]
    _attend(layer, before, table, keys_values, None, case, device, make_tensors)
    step = [(index, (k - q, k)) for index, (q, k) in enumerate(rows)]
    output = _attend(layer, step, table, keys_values, queries, case, device, make_tensors)
    slopes = case.slopes()
    kept = [case.kept(each) for each in keys_values]
    expected = [
        dense(queries[index].double(), kept[index][:, 0], kept[index][:, 1], case, slopes)
        for index, _ in _decodes_first(step)
    ]
    return ConformanceResult(output.double().cpu(), torch.cat(expected))


Spans = Iterable[tuple[int, tuple[int, int]]]


def _attend(
    layer: PagedLayer,
    spans: Spans,
    table: NDArray[np.int64],
    keys_values: Sequence[Tensor],
    queries: Sequence[Tensor] | None,
    case: ConformanceCase,
    device: torch.device,
    make_tensors: Callable[[StepMetadata], StepTensors],
) -> Tensor:
    """One step of some rows, each with its span of positions. queries: None to store the K/V only."""
    spans = _decodes_first(spans)
    if not spans:
        return torch.empty(0)
    metadata = metadata_of(table[[index for index, _ in spans]], [span for _, span in spans], case.block_size)
    key_value = torch.cat([keys_values[index][first:last] for index, (first, last) in spans])
    if queries is None:
        query = torch.zeros(len(key_value), case.num_heads, case.head_dim, dtype=key_value.dtype)
    else:
        query = torch.cat([queries[index] for index, _ in spans])
    with layer.state.use(Step(metadata, make_tensors(metadata))):
        return layer(query.to(device), key_value.to(device))


def _decodes_first(spans: Spans) -> list[tuple[int, tuple[int, int]]]:
    return sorted(spans, key=lambda item: item[1][1] - item[1][0] > 1)


def dense(query: Tensor, keys: Tensor, values: Tensor, case: ConformanceCase, slopes: Tensor | None) -> Tensor:
    """query: [seqlen_q, num_heads, head_dim] at the end of keys, values: [seqlen_k, num_kv_heads, head_dim]."""
    group = case.num_heads // case.num_kv_heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * case.head_dim**-0.5
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


def shuffled_table(lengths: Sequence[int], block_size: int) -> tuple[NDArray[np.int64], int]:
    """A block table in random order for rows of these lengths, and how many blocks there are with block 0."""
    blocks = [-(-length // block_size) for length in lengths]
    order = iter(np.random.default_rng(3).permutation(sum(blocks)) + 1)
    table = np.zeros((len(lengths), max(blocks)), dtype=np.int64)
    for row, count in zip(table, blocks, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    return table, sum(blocks) + 1


def metadata_of(table: NDArray[np.int64], spans: Sequence[tuple[int, int]], block_size: int) -> StepMetadata:
    """The geometry of a step that computes these positions of its rows."""
    slots = [
        row[position // block_size] * block_size + position % block_size
        for row, (first, last) in zip(table, spans, strict=True)
        for position in range(first, last)
    ]
    seqlen_q = np.array([last - first for first, last in spans], dtype=np.int64)
    return StepMetadata(
        slots=np.array(slots, dtype=np.int64),
        block_table=table,
        seqlen_q=seqlen_q,
        seqlen_k=np.array([last for _, last in spans], dtype=np.int64),
        num_single_rows=int((seqlen_q == 1).sum()),
    )


def paged_layer(
    case: ConformanceCase,
    num_blocks: int,
    prefill: AttentionKernel,
    decode: AttentionKernel,
    store: CacheStore,
    device: torch.device,
    dtype: torch.dtype,
) -> PagedLayer:
    """One layer over a poisoned cache."""
    state = StepState()
    shape, cache_dtype = LayerShape(case.num_kv_heads, case.head_dim), case.cache_dtype or dtype
    state.cache = KVCache([shape], num_blocks, case.block_size, cache_dtype, device, [case.scales])
    state.cache.layers[0].buffer.fill_(min(POISON, torch.finfo(cache_dtype).max))
    choice = AttentionChoice(prefill, decode, store, case.block_size, decode.name, "conformance")
    slopes = case.slopes()
    slopes = None if slopes is None else slopes.to(device)
    return PagedLayer(state, 0, choice, AttentionOptions(case.head_dim**-0.5, case.window, case.softcap, slopes))
