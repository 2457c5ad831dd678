"""Paged attention in plain torch: the reference for every other kernel, and the kernel of a CPU without a compiler.

Decode rows are one batched product over K/V gathered by page; prefill rows go through SDPA one by one. At one query
row `baddbmm` and `bmm` on contiguous K/V are 3.5 to 9 times as fast as SDPA.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.attention.kernel import AttentionNeeds, AttentionOptions, PerStep
from reference_server.model_server.memory import float8
from reference_server.model_server.memory.kv_cache import LayerCache, LayerShape
from reference_server.model_server.step_state import Step, StepMetadata

# Query rows computed at a time when a mask is built, so that the mask never grows with the square of the prompt.
MASKED_QUERY_ROWS = 256
# With fewer gathered elements, products are in float32: the set-up of a 16-bit product takes longer than the product.
FEW_ELEMENTS = 1 << 17
# Largest number of gathered bytes that stay in the processor's caches until the products read them.
TILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Decode rows `first` to `last` (exclusive), attended together over equally many pages each.

    index: [2 * rows * num_kv_heads * pages] int64, into the cache as [blocks * 2 * num_kv_heads, page of a head].
    biases: by window and by whether there is ALiBi, made when first needed.
    """

    first: int
    last: int
    index: Tensor
    biases: dict[tuple[int | None, bool], Tensor] = field(default_factory=dict)


class TorchDecode:
    """One query token a row: two batched products over gathered pages, in groups of rows that fit in a CPU cache."""

    name = "torch"
    block_size = 16
    is_capturable = False

    def __init__(self) -> None:
        self._tiles: PerStep[dict[LayerShape, list[AttentionTile]]] = PerStep()

    @staticmethod
    def supports(_needs: AttentionNeeds, /) -> bool:
        return True

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        shape_tiles = self._tiles.of(step, dict)
        tiles = shape_tiles.get(cache.shape)
        if tiles is None:
            tiles = shape_tiles[cache.shape] = tiles_of(step.metadata, len(query), cache.buffer)
        if len(tiles) == 1:
            return _attend_tile(query, cache.buffer, tiles[0], None, step.metadata, options)
        largest = max(len(tile.index) for tile in tiles) * cache.buffer.shape[3] * cache.buffer.shape[4]
        gathered = cache.buffer.new_empty(largest)
        parts = [
            _attend_tile(query[tile.first : tile.last], cache.buffer, tile, gathered, step.metadata, options)
            for tile in tiles
        ]
        return torch.cat(parts)


def tiles_of(metadata: StepMetadata, rows: int, buffer: Tensor) -> list[AttentionTile]:
    """The decode rows of a step in tiles of about TILE_BYTES of K/V."""
    _, _, num_kv_heads, block_size, _ = buffer.shape
    blocks = -(-metadata.seqlen_k[:rows] // block_size)
    row_bytes = int(blocks.max()) * buffer[0].nbytes
    starts = np.arange(0, rows, max(1, TILE_BYTES // row_bytes))
    counts = np.maximum.reduceat(blocks, starts).tolist()
    ends = [*starts[1:].tolist(), rows]
    return [
        AttentionTile(first, last, _page_index(metadata.block_table[first:last, :count], num_kv_heads, buffer))
        for first, last, count in zip(starts.tolist(), ends, counts, strict=True)
    ]


def _page_index(table: NDArray[np.int64], num_kv_heads: int, buffer: Tensor) -> Tensor:
    """Keys then values, by row, head and page."""
    planes = np.arange(2 * num_kv_heads).reshape(2, 1, num_kv_heads, 1)
    return torch.from_numpy((table[None, :, None, :] * (2 * num_kv_heads) + planes).reshape(-1)).to(buffer.device)


def _attend_tile(
    query: Tensor,
    buffer: Tensor,
    tile: AttentionTile,
    gathered: Tensor | None,
    metadata: StepMetadata,
    options: AttentionOptions,
) -> Tensor:
    """query: [rows of the tile, num_heads, head_dim]. gathered: memory for its pages; None allocates it."""
    _, _, num_kv_heads, block_size, head_dim = buffer.shape
    rows, num_heads, _ = query.shape
    page = block_size * head_dim
    out = None if gathered is None else gathered[: len(tile.index) * page].view(-1, page)
    pages = float8.widened(torch.index_select(buffer.view(-1, page), 0, tile.index, out=out), query.dtype)
    grouped = query.reshape(rows * num_kv_heads, num_heads // num_kv_heads, head_dim)
    if pages.numel() < FEW_ELEMENTS and query.dtype != torch.float32:
        pages, grouped = pages.float(), grouped.float()
    keys, values = pages.view(2, rows * num_kv_heads, -1, head_dim).unbind(0)
    kind = (options.window, options.alibi_slopes is not None)
    bias = tile.biases.get(kind)
    if bias is None:
        bias = tile.biases[kind] = _bias(metadata, tile, num_kv_heads, keys.shape[1], options, grouped)
    if options.softcap is None:
        scores = torch.baddbmm(bias, grouped, keys.transpose(1, 2), alpha=options.scaling)
    else:
        scores = _capped(torch.bmm(grouped, keys.transpose(1, 2)), options.scaling, options.softcap) + bias
    attended = torch.bmm(torch.softmax(scores, -1), values).view(rows, num_heads, head_dim)
    return attended.to(query.dtype)


def _bias(
    metadata: StepMetadata, tile: AttentionTile, num_kv_heads: int, length: int, options: AttentionOptions, like: Tensor
) -> Tensor:
    """[rows * num_kv_heads, 1 or group, length]: minus infinity where a row has no key, plus ALiBi.

    like: [rows * num_kv_heads, group, head_dim], for its type and device.
    """
    position = np.arange(length)
    seqlen_k = metadata.seqlen_k[tile.first : tile.last, None]
    visible = position < seqlen_k
    if options.window is not None:
        visible &= position >= seqlen_k - options.window
    mask = torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf))).to(like.device)
    per_head = mask[:, None, None, :].expand(-1, num_kv_heads, 1, length)
    if options.alibi_slopes is not None:
        distance = torch.from_numpy((position - seqlen_k + 1).astype(np.float32)).to(like.device)
        slopes = options.alibi_slopes.view(1, num_kv_heads, like.shape[1], 1)
        per_head = per_head + slopes * distance[:, None, None, :]
    return per_head.to(like.dtype).reshape(len(like), -1, length)


class TorchPrefill:
    """Several query tokens a row: SDPA per row over its gathered pages."""

    name = "torch"
    block_size = 16
    is_capturable = False

    @staticmethod
    def supports(_needs: AttentionNeeds, /) -> bool:
        return True

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        metadata, start = step.metadata, 0
        for row in range(metadata.num_single_rows, metadata.num_rows):
            seqlen_q, seqlen_k = int(metadata.seqlen_q[row]), int(metadata.seqlen_k[row])
            end = start + seqlen_q
            keys, values = _gather(cache.buffer, metadata.block_table[row], seqlen_k, query.dtype)
            first = metadata.num_single_rows + start
            spans = None if metadata.bidirectional is None else metadata.bidirectional[:, first : first + seqlen_q]
            output[start:end] = _attend(query[start:end], keys, values, options, spans)
            start = end
        return output


def _gather(buffer: Tensor, blocks: NDArray[np.int64], length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A row's keys and values, each [num_kv_heads, length, head_dim]."""
    _, _, num_kv_heads, block_size, head_dim = buffer.shape
    index = torch.from_numpy(blocks[: -(-length // block_size)]).to(buffer.device)
    pages = (
        float8.widened(buffer.index_select(0, index), dtype)
        .permute(1, 2, 0, 3, 4)
        .reshape(2, num_kv_heads, -1, head_dim)
    )
    keys, values = pages[:, :, :length].unbind(0)
    return keys, values


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, spans: NDArray[np.int64] | None = None
) -> Tensor:
    """query: [seqlen_q, num_heads, head_dim], its last token at the last key. Returns query's shape.

    spans: [2, seqlen_q], first and end of the keys that each token attends to in both directions; None if causal.
    """
    seqlen_q, seqlen_k = query.shape[0], keys.shape[1]
    queries = query.transpose(0, 1)
    grouped = queries.shape[0] != keys.shape[0]
    windowed = options.window is not None and options.window < seqlen_k
    is_plain = spans is None and not windowed and options.alibi_slopes is None and options.softcap is None
    if is_plain and seqlen_q == seqlen_k:
        attended = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=options.scaling, enable_gqa=grouped
        )
        return attended[0].transpose(0, 1)
    parts = []
    for first in range(0, seqlen_q, MASKED_QUERY_ROWS):
        part = queries[:, first : first + MASKED_QUERY_ROWS]
        own = None if spans is None else spans[:, first : first + MASKED_QUERY_ROWS]
        mask = _mask(seqlen_k - seqlen_q + first, part.shape[1], seqlen_k, options, query, own)
        if options.softcap is not None:
            parts.append(_attend_capped(part, keys, values, mask[0], options.scaling, options.softcap))
            continue
        attended = F.scaled_dot_product_attention(
            part[None], keys[None], values[None], attn_mask=mask, scale=options.scaling, enable_gqa=grouped
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


def _attend_capped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """SDPA has no softcap. query: [num_heads, rows, head_dim]; returns [rows, num_heads, head_dim]."""
    num_heads, rows, head_dim = query.shape
    grouped = query.reshape(keys.shape[0], -1, head_dim)
    scores = _capped(torch.bmm(grouped, keys.transpose(1, 2)), scaling, softcap)
    weights = torch.softmax(scores.view(num_heads, rows, -1) + mask, -1, dtype=torch.float32).to(values.dtype)
    attended = torch.bmm(weights.view(keys.shape[0], -1, keys.shape[1]), values)
    return attended.view(num_heads, rows, head_dim).transpose(0, 1)


def _capped(products: Tensor, scaling: float, softcap: float) -> Tensor:
    """Scores bounded by -softcap and softcap; `products` is overwritten."""
    return products.mul_(scaling / softcap).tanh_().mul_(softcap)


def _mask(
    first: int,
    rows: int,
    seqlen_k: int,
    options: AttentionOptions,
    like: Tensor,
    spans: NDArray[np.int64] | None = None,
) -> Tensor:
    """[1, 1 or num_heads, rows, seqlen_k] additive, for queries at positions `first`, `first + 1`, ..."""
    distance = (
        torch.arange(seqlen_k, device=like.device) - torch.arange(first, first + rows, device=like.device)[:, None]
    )
    hidden = distance > 0
    if options.window is not None:
        hidden |= distance <= -options.window
    if spans is not None:
        starts, ends = torch.from_numpy(spans).to(like.device)[:, :, None]
        key = torch.arange(seqlen_k, device=like.device)
        hidden &= (key < starts) | (key >= ends)
    mask = torch.zeros((1, rows, seqlen_k), device=like.device)
    if options.alibi_slopes is not None:
        mask = options.alibi_slopes.view(-1, 1, 1) * distance.float()
    return mask.masked_fill(hidden, float("-inf")).to(like.dtype)[None]
