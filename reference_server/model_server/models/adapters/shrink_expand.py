"""The Triton kernels of adapters: shrink (x @ A.T) and expand (y += shrunk @ B.T), tokens grouped by adapter.

A record of int64 describes an adapter's factors at a site: address of A, its ranks, then for each part of the site
address of B, rank, first rank, outputs, first output. A part that the adapter does not change has rank 0. The import of
this module needs Triton. Source: Punica (arXiv 2310.18547), segmented gather matrix-vector multiplication.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def shrink(
    rows, shrunk, records, order, starts, groups,
    row_stride, inputs, tokens, ranks_room, row_tiles, share,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of tokens and ranks of one group, over one split of the inputs.

    rows: [all tokens, inputs]. shrunk: [splits, tokens, ranks_room] float32; split s has the sum over the inputs
    `[s * share, (s + 1) * share)`. order, starts, groups: see `AdapterSegments`.
    """
    group = tl.program_id(0) // row_tiles
    first_rank = tl.program_id(1) * RANKS
    split = tl.program_id(2)
    start = tl.load(starts + group) + tl.program_id(0) % row_tiles * ROWS
    end = tl.load(starts + group + 1)
    record = records + tl.load(groups + group) * FIELDS
    ranks = tl.load(record + 1)
    if (start < end) & (first_rank < ranks):
        a = tl.load(record).to(tl.pointer_type(rows.dtype.element_ty))
        place = start + tl.arange(0, ROWS)
        in_group = place < end
        token = tl.load(order + place, mask=in_group, other=0)
        rank = first_rank + tl.arange(0, RANKS)
        in_ranks = rank < ranks
        total = tl.zeros((ROWS, RANKS), tl.float32)
        stop = tl.minimum((split + 1) * share, inputs)
        for at in range(split * share, stop, TILE):
            column = at + tl.arange(0, TILE)
            in_row = column < stop
            x = tl.load(
                rows + token[:, None] * row_stride + column[None, :],
                mask=in_group[:, None] & in_row[None, :],
                other=0.0,
            )
            factor = tl.load(
                a + rank[None, :].to(tl.int64) * inputs + column[:, None],
                mask=in_ranks[None, :] & in_row[:, None],
                other=0.0,
            )
            total = tl.dot(x, factor, total, input_precision="ieee")
        # `line` is 64-bit, because the elements of `starts` are.
        line = place + split * tokens
        target = shrunk + line[:, None] * ranks_room + rank[None, :]
        tl.store(target, total, mask=in_group[:, None] & in_ranks[None, :])


@triton.jit
def expand(
    shrunk, result, records, order, starts, groups,
    result_stride, tokens, ranks_room, row_tiles,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add one tile of tokens and outputs of one group and part to result, [all tokens, outputs].

    No two programs write the same element: a token has one adapter, and the parts have separate outputs.
    """
    group = tl.program_id(0) // row_tiles
    first = tl.program_id(1) * TILE
    start = tl.load(starts + group) + tl.program_id(0) % row_tiles * ROWS
    end = tl.load(starts + group + 1)
    record = records + tl.load(groups + group) * FIELDS + 2 + tl.program_id(2) * 5
    ranks = tl.load(record + 1)
    outputs = tl.load(record + 3)
    if (start < end) & (ranks > 0) & (first < outputs):
        dtype = result.dtype.element_ty
        b = tl.load(record).to(tl.pointer_type(dtype))
        first_rank = tl.load(record + 2)
        place = start + tl.arange(0, ROWS)
        in_group = place < end
        output = first + tl.arange(0, TILE)
        in_part = output < outputs
        total = tl.zeros((ROWS, TILE), tl.float32)
        for at in range(0, ranks, RANKS):
            rank = at + tl.arange(0, RANKS)
            in_ranks = rank < ranks
            mask = in_group[:, None] & in_ranks[None, :]
            x = tl.zeros((ROWS, RANKS), tl.float32)
            for split in tl.static_range(SPLITS):
                line = place + split * tokens
                source = shrunk + line[:, None] * ranks_room + first_rank + rank[None, :]
                x += tl.load(source, mask=mask, other=0.0)
            factor = tl.load(
                b + output[None, :].to(tl.int64) * ranks + rank[:, None],
                mask=in_part[None, :] & in_ranks[:, None],
                other=0.0,
            )
            total = tl.dot(x.to(dtype), factor, total, input_precision="ieee")
        token = tl.load(order + place, mask=in_group, other=0)
        target = result + token[:, None] * result_stride + tl.load(record + 4) + output[None, :]
        mask = in_group[:, None] & in_part[None, :]
        tl.store(target, (tl.load(target, mask=mask, other=0.0).to(tl.float32) + total).to(dtype), mask=mask)
