"""The Triton kernels of attention: store K/V, decode in splits (one query token a row), prefill (several tokens a row).

All read the cache in place (kv_cache.py), for any page size and head size. FLOAT8 is 0 for a cache in a float type that
Triton loads. A cache of eight-bit floats is passed as bytes, since few GPUs have instructions for e4m3. FLOAT8 is then
the number of mantissa bits: 3 (e4m3) or 2 (e5m2). The import of this module needs Triton. Positions count from the
start of a row. Slots and addresses are 64-bit, since a cache of 141 GB has more than 2^31 elements.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def store(
    key_value, cache, slots,
    token_stride, plane_stride, head_stride,
    num_kv_heads, head_dim, block_size, key_factor, value_factor,
    HEADS: tl.constexpr, DIM: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Store the keys (program id 1 is 0) or the values (1) of one token. A token with a negative slot is skipped.

    key_factor, value_factor: multiply keys and values before they are rounded to eight bits.
    """
    token = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    heads = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, DIM)[None, :]
    mask = (heads < num_kv_heads) & (dims < head_dim)
    source = key_value + token * token_stride + plane * plane_stride + heads * head_stride + dims
    line = ((slot // block_size * 2 + plane) * num_kv_heads + heads) * block_size + slot % block_size
    if slot >= 0:
        values = tl.load(source, mask=mask, other=0.0)
        if FLOAT8 > 0:
            stored = _rounded(values.to(tl.float32) * tl.where(plane == 0, key_factor, value_factor), FLOAT8)
        else:
            stored = values.to(cache.dtype.element_ty)
        tl.store(cache + line * head_dim + dims, stored, mask=mask)


@triton.jit
def _rounded(values, MANTISSA: tl.constexpr):
    """The bytes of float32 values, rounded as by `float8.rounded`, with the steps of cpu_kernels/float8.h."""
    shift: tl.constexpr = 120 if MANTISSA == 3 else 112
    end: tl.constexpr = 0x7F if MANTISSA == 3 else 0x7C
    dropped: tl.constexpr = 23 - MANTISSA
    smallest: tl.constexpr = (shift + 1) << 23
    largest: tl.constexpr = ((end - 1) << dropped) + (shift << 23)
    magic: tl.constexpr = (shift + 1 - MANTISSA + 23) << 23
    bits = values.to(tl.int32, bitcast=True)
    whole = bits & 0x7FFFFFFF
    magnitude = tl.minimum(whole, largest)
    normal = ((magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)) >> dropped) - (shift << MANTISSA)
    unit = tl.full(magnitude.shape, magic, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True) - magic
    rounded = tl.where(magnitude < smallest, subnormal, normal)
    rounded = tl.where(whole > 0x7F800000, 0x7F, rounded)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _widened(stored, DTYPE: tl.constexpr, MANTISSA: tl.constexpr):
    """Elements of the cache, converted to the compute type without rounding."""
    if MANTISSA == 0:
        return stored.to(DTYPE)
    # The bits are placed in a float16, which has the exponent bias of e5m2. The bias of e4m3 is smaller by 8.
    bits = stored.to(tl.int16)
    if MANTISSA == 2:
        return (bits << 8).to(tl.float16, bitcast=True).to(DTYPE)
    magnitude = bits & 0x7F
    halves = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), halves.to(tl.float32) * 256.0).to(DTYPE)


@triton.jit
def _cap(scores, softcap):
    # tanh(x) is 2 * sigmoid(2 x) - 1.
    return softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)


@triton.jit
def decode(
    query, cache, block_table, seqlen_k, slopes, output, partial, maxima, sums,
    row_stride, query_head_stride, table_stride,
    num_kv_heads, head_dim, block_size, scaling, softcap,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one row's keys, with the query heads that share a K/V head.

    query: [rows, num_heads, head_dim]. output: the same, contiguous; written only with one split. With several,
    `merge` reads partial [rows, num_heads, SPLITS, DIM] and maxima and sums [rows, num_heads, SPLITS], all float32.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seqlen_k + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE
    start = first + split * share
    end = tl.minimum(start + share, length)

    group = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIM)
    heads = kv_head * GROUP + group
    in_group = group < GROUP
    in_head = dims < head_dim
    places = query + row * row_stride + heads[:, None] * query_head_stride + dims[None, :]
    queries = tl.load(places, mask=in_group[:, None] & in_head[None, :], other=0.0)
    if HAS_ALIBI:
        slope = tl.load(slopes + heads, mask=in_group, other=0.0)
    largest = tl.full((GROUP_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_TILE,), tl.float32)
    attended = tl.zeros((GROUP_TILE, DIM), tl.float32)
    for at in range(start, end, TILE):
        position = at + tl.arange(0, TILE)
        seen = position < end
        page = tl.load(block_table + row * table_stride + position // block_size, mask=seen, other=0).to(tl.int64)
        line = (page * 2 * num_kv_heads + kv_head) * block_size + position % block_size
        keys = tl.load(cache + line[None, :] * head_dim + dims[:, None], mask=seen[None, :] & in_head[:, None], other=0)
        scores = tl.dot(queries, _widened(keys, queries.dtype, FLOAT8), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            scores = _cap(scores, softcap)
        if HAS_ALIBI:
            scores += slope[:, None] * (position - length + 1)[None, :].to(tl.float32)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            cache + (line + num_kv_heads * block_size)[:, None] * head_dim + dims[None, :],
            mask=seen[:, None] & in_head[None, :],
            other=0,
        )
        values = _widened(values, queries.dtype, FLOAT8)
        attended = attended * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        largest = new_largest

    head = row * num_kv_heads * GROUP + heads
    if SPLITS == 1:
        # The result of a row without keys is 0.
        attended = attended / tl.where(total > 0, total, 1.0)[:, None]
        target = output + head[:, None] * head_dim + dims[None, :]
        tl.store(target, attended.to(output.dtype.element_ty), mask=in_group[:, None] & in_head[None, :])
    else:
        place = head * SPLITS + split
        tl.store(partial + place[:, None] * DIM + dims[None, :], attended, mask=in_group[:, None])
        tl.store(maxima + place, largest, mask=in_group)
        tl.store(sums + place, total, mask=in_group)


@triton.jit
def merge(partial, maxima, sums, output, head_dim, SPLITS: tl.constexpr, DIM: tl.constexpr):
    """Combine the splits of one row and head, weighted by their maxima."""
    head = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    largest = tl.load(maxima + head * SPLITS + splits)
    highest = tl.max(largest, 0)
    weights = tl.where(largest == float("-inf"), 0.0, tl.exp(largest - highest))
    total = tl.sum(tl.load(sums + head * SPLITS + splits) * weights, 0)
    parts = tl.load(partial + (head * SPLITS + splits)[:, None] * DIM + dims[None, :])
    attended = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + head * head_dim + dims, attended.to(output.dtype.element_ty), mask=dims < head_dim)


@triton.jit
def prefill(
    query, cache, block_table, cu_seqlen_q, seqlen_k, slopes, output,
    token_stride, query_head_stride, table_stride,
    num_kv_heads, head_dim, block_size, scaling, softcap,
    GROUP: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Attend from QUERIES tokens of one row and head to all keys up to their positions.

    query: [tokens, num_heads, head_dim]; the last token of a row has the position of its last key. output: the same,
    contiguous.
    """
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    first_token = tl.load(cu_seqlen_q + row)
    seqlen_q = tl.load(cu_seqlen_q + row + 1) - first_token
    # The last tiles have the most keys, so they start first.
    tile = tl.cdiv(seqlen_q, QUERIES) - 1 - tl.program_id(0)
    if tile < 0:
        return
    length = tl.load(seqlen_k + row)
    kv_head = head // GROUP
    number = tile * QUERIES + tl.arange(0, QUERIES)
    in_row = number < seqlen_q
    own_position = length - seqlen_q + number
    dims = tl.arange(0, DIM)
    in_head = dims < head_dim
    token = (first_token + number).to(tl.int64)
    places = query + token[:, None] * token_stride + head * query_head_stride + dims[None, :]
    queries = tl.load(places, mask=in_row[:, None] & in_head[None, :], other=0.0)
    if HAS_ALIBI:
        slope = tl.load(slopes + head)
    end = tl.minimum(length - seqlen_q + (tile + 1) * QUERIES, length)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(length - seqlen_q + tile * QUERIES - WINDOW + 1, 0) // TILE * TILE
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    attended = tl.zeros((QUERIES, DIM), tl.float32)
    for at in range(start, end, TILE):
        position = at + tl.arange(0, TILE)
        stored = position < end
        page = tl.load(block_table + row * table_stride + position // block_size, mask=stored, other=0).to(tl.int64)
        line = (page * 2 * num_kv_heads + kv_head) * block_size + position % block_size
        keys = tl.load(
            cache + line[None, :] * head_dim + dims[:, None], mask=stored[None, :] & in_head[:, None], other=0
        )
        scores = tl.dot(queries, _widened(keys, queries.dtype, FLOAT8), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            scores = _cap(scores, softcap)
        distance = position[None, :] - own_position[:, None]
        if HAS_ALIBI:
            scores += slope * distance.to(tl.float32)
        seen = (distance <= 0) & stored[None, :]
        if WINDOW > 0:
            seen = seen & (distance > -WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # For a token whose window begins after this tile, every score so far is -inf.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp(scores - reference[:, None])
        shrink = tl.exp(largest - reference)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            cache + (line + num_kv_heads * block_size)[:, None] * head_dim + dims[None, :],
            mask=stored[:, None] & in_head[None, :],
            other=0,
        )
        values = _widened(values, queries.dtype, FLOAT8)
        attended = attended * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        largest = new_largest
    attended = attended / tl.where(total > 0, total, 1.0)[:, None]
    target = output + (token * num_kv_heads * GROUP + head)[:, None] * head_dim + dims[None, :]
    tl.store(target, attended.to(output.dtype.element_ty), mask=in_row[:, None] & in_head[None, :])
