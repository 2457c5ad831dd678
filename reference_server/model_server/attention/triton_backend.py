"""Paged attention in Triton: any page size, window, softcap and ALiBi; decode in splits of a row's keys.

The number of splits depends on the number of rows only, so that one captured graph serves every length.
"""

import functools
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from reference_server.model_server.attention.kernel import AttentionNeeds, AttentionOptions
from reference_server.model_server.memory import float8
from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.step_state import Step

logger = logging.getLogger(__name__)

MAX_SPLITS = 32
# Those of an H200, for devices without CUDA.
DEFAULT_PROCESSORS = 132
# Smallest number of rows in a tensor-core product.
LEAST_TILE = 16
DECODE_TILE = 64
PREFILL_QUERIES = 128
PREFILL_TILE = 64
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def is_offered(needs: AttentionNeeds) -> bool:
    """Whether the device computes with Triton's kernels."""
    return needs.device_type == "cuda" and needs.dtype in DTYPES and launches()


@functools.cache
def launches() -> bool:
    """Whether Triton is installed, compiles a kernel here (with a C compiler) and launches it."""
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return False
    try:
        slots = torch.zeros(1, dtype=torch.int64, device="cuda")
        cache, key_value = torch.zeros(1, 2, 1, 16, 16, device="cuda"), torch.ones(1, 2, 1, 16, device="cuda")
        kernels().store[(1, 2)](key_value, cache, slots, 32, 16, 16, 1, 16, 16, 1.0, 1.0, HEADS=1, DIM=16, FLOAT8=0)
        return bool(cache.sum() == 32)
    except Exception as error:  # of a compiler, a driver or an installation
        logger.warning("Triton is installed but cannot launch a kernel here, so its kernels are not used: %s", error)
        return False


@functools.cache
def kernels() -> Any:
    """The module of the kernels; only a machine with Triton can import it."""
    from reference_server.model_server.attention import triton_attention

    return triton_attention


class TritonDecode:
    """One query token a row. The query heads of one K/V head are one tile, so that tensor cores compute it."""

    name = "triton"
    block_size = 16
    is_capturable = True

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool:
        return is_offered(needs)

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        _, _, num_kv_heads, block_size, head_dim = cache.buffer.shape
        rows, num_heads, _ = query.shape
        group, dim = num_heads // num_kv_heads, power_of_two(head_dim, LEAST_TILE)
        tensors = step.tensors
        query = query if query.stride(2) == 1 else query.contiguous()
        splits = splits_for(rows, num_kv_heads, processors(query.device))
        output = torch.empty((rows, num_heads, head_dim), dtype=query.dtype, device=query.device)
        partial = maxima = sums = output
        if splits > 1:
            room = torch.empty(rows * num_heads * splits * (dim + 2), dtype=torch.float32, device=query.device)
            partial, maxima, sums = torch.split(room, [rows * num_heads * splits * size for size in (dim, 1, 1)])
        kernels().decode[(rows, num_kv_heads, splits)](
            *(query, elements(cache.buffer), tensors.block_table, tensors.seqlen_k, _slopes(options, query), output),
            *(partial, maxima, sums, query.stride(0), query.stride(1), tensors.block_table.stride(0)),
            *(num_kv_heads, head_dim, block_size, options.scaling, options.softcap or 1.0),
            GROUP=group,
            GROUP_TILE=power_of_two(group, LEAST_TILE),
            DIM=dim,
            TILE=tile_for(dim, query.dtype, DECODE_TILE),
            SPLITS=splits,
            **_masks(options),
            FLOAT8=mantissa_bits(cache.buffer.dtype),
            num_warps=4,
        )
        if splits > 1:
            kernels().merge[(rows * num_heads,)](
                *(partial, maxima, sums, output, head_dim), SPLITS=splits, DIM=dim, num_warps=4
            )
        return output


class TritonPrefill:
    """Several query tokens a row, over the cache in place: prefixes and earlier chunks are not gathered."""

    name = "triton"
    block_size = 16
    is_capturable = False

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool:
        return is_offered(needs)

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        _, _, num_kv_heads, block_size, head_dim = cache.buffer.shape
        _, num_heads, _ = query.shape
        dim = power_of_two(head_dim, LEAST_TILE)
        tensors = step.tensors
        query = query if query.stride(2) == 1 else query.contiguous()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        metadata = step.metadata
        first = metadata.num_single_rows
        queries = tile_for(dim, query.dtype, PREFILL_QUERIES)
        tiles = -(-int(metadata.seqlen_q[first:].max()) // queries)
        kernels().prefill[(tiles, num_heads, metadata.num_rows - first)](
            *(
                query,
                elements(cache.buffer),
                tensors.block_table[first:],
                tensors.cu_seqlen_q,
                tensors.seqlen_k[first:],
            ),
            *(_slopes(options, query), output, query.stride(0), query.stride(1), tensors.block_table.stride(0)),
            *(num_kv_heads, head_dim, block_size, options.scaling, options.softcap or 1.0),
            GROUP=num_heads // num_kv_heads,
            DIM=dim,
            QUERIES=queries,
            TILE=tile_for(dim, query.dtype, PREFILL_TILE),
            **_masks(options),
            FLOAT8=mantissa_bits(cache.buffer.dtype),
            num_warps=8 if queries > 64 else 4,
        )
        return output


def elements(buffer: Tensor) -> Tensor:
    """The cache as the kernels read and write it: eight-bit floats as bytes."""
    return buffer.view(torch.uint8) if float8.is_float8(buffer.dtype) else buffer


def mantissa_bits(dtype: torch.dtype) -> int:
    """The kernels' FLOAT8 for a cache of this type."""
    return {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}.get(dtype, 0)


def _masks(options: AttentionOptions) -> dict[str, Any]:
    return {
        "WINDOW": options.window or 0,
        "HAS_SOFTCAP": options.softcap is not None,
        "HAS_ALIBI": options.alibi_slopes is not None,
    }


def _slopes(options: AttentionOptions, query: Tensor) -> Tensor:
    """The slopes; a kernel without ALiBi gets any pointer and does not read it."""
    return query if options.alibi_slopes is None else options.alibi_slopes


def splits_for(rows: int, num_kv_heads: int, processors: int) -> int:
    """Parts of each row's keys: a power of two up to 32 that gives about two programs for each processor.

    >>> [splits_for(rows, 8, 132) for rows in (1, 4, 16, 64)]
    [32, 8, 2, 1]
    """
    wanted = 2 * processors // (rows * num_kv_heads)
    return min(MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def tile_for(dim: int, dtype: torch.dtype, most: int) -> int:
    """Rows of a tile that fits in shared memory together with the other tiles, for heads of `dim` padded elements."""
    return power_of_two(min(most, most * 256 // (dim * dtype.itemsize)), LEAST_TILE)


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least `number` and at least `least`.

    >>> [power_of_two(number) for number in (1, 8, 24, 128)]
    [1, 8, 32, 128]
    """
    return max(least, 1 << (number - 1).bit_length())


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return DEFAULT_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
