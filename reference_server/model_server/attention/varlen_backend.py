"""Paged attention by `torch.nn.attention.varlen`, torch's own flash attention: CUDA, 16-bit, no softcap, no ALiBi.

From torch 2.12 the operator reads block tables and serves both phases. Before, it serves prompts only: their keys and
values are first gathered from the cache, in a copy that is short compared with a prompt's attention. A test on the
device checks whether it supports grouped heads, packed and with block tables. The operator is imported at its first
use, because it imports torch's compiler.
"""

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.attention import triton_backend
from reference_server.model_server.attention.kernel import AttentionNeeds, AttentionOptions, PerStep
from reference_server.model_server.attention.staging import stage
from reference_server.model_server.device import first_line
from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.step_state import Step, StepMetadata

logger = logging.getLogger(__name__)

PAGE = 256
DTYPES = (torch.float16, torch.bfloat16)
LEAST_CAPABILITY = (8, 0)
LARGEST_HEAD = 256

READS_TABLES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
# torch 2.11 has no such argument and checks no head counts.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if READS_TABLES else {}


class VarlenPrefill:
    """Several query tokens a row."""

    name = "varlen"
    block_size = PAGE if READS_TABLES else triton_backend.TritonPrefill.block_size
    is_capturable = False

    def __init__(self) -> None:
        self._index: PerStep[list[Tensor]] = PerStep()

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool:
        return _is_offered(needs)

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        metadata, tensors = step.metadata, step.tensors
        rows = slice(metadata.num_single_rows, None)
        max_q, max_k = int(metadata.seqlen_q[rows].max()), int(metadata.seqlen_k[rows].max())
        if READS_TABLES and cache.block_size % PAGE == 0 and computes(query.dtype, by_tables=True):
            keys, values = cache.pages()
            paged: dict[str, Tensor] = {"seqused_k": tensors.seqlen_k[rows], "block_table": tensors.block_table[rows]}
            cu_seqlen_k = None
        else:
            index = self._index.of(step, lambda: token_index(metadata, cache.block_size, cache.buffer.device))
            keys, values = gathered(cache, index)
            paged, cu_seqlen_k = {}, tensors.cu_seqlen_k
        attended: Tensor = _attend(
            *(query.contiguous(), keys, values, tensors.cu_seqlen_q, cu_seqlen_k, max_q, max_k),
            scale=options.scaling,
            window_size=window_of(options),
            **_GROUPED,
            **paged,
        )
        return attended


class VarlenDecode:
    """One query token a row, over block tables."""

    name = "varlen"
    block_size = PAGE
    is_capturable = True

    def __init__(self) -> None:
        self._cu_seqlen_q: PerStep[Tensor] = PerStep()

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool:
        return (
            READS_TABLES
            and (needs.block_size or PAGE) % PAGE == 0
            and _is_offered(needs)
            and triton_backend.is_offered(needs)
            and computes(needs.dtype, by_tables=True)
        )

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        tensors, rows = step.tensors, len(query)
        keys, values = cache.pages()
        cu_seqlen_q = self._cu_seqlen_q.of(step, lambda: torch.arange(rows + 1, dtype=torch.int32, device=query.device))
        # Uses the capacity of the tables instead of the rows' lengths, so that a captured graph serves every length.
        max_k = tensors.block_table.shape[1] * cache.block_size
        attended: Tensor = _attend(
            *(query.contiguous(), keys, values, cu_seqlen_q, None, 1, max_k),
            scale=options.scaling,
            window_size=window_of(options),
            seqused_k=tensors.seqlen_k[:rows],
            block_table=tensors.block_table[:rows],
            **_GROUPED,
        )
        return attended


def window_of(options: AttentionOptions) -> tuple[int, int]:
    """The operator's bounds leave the query itself out; (-1, 0) is causal without a window."""
    return (-1 if options.window is None else options.window - 1, 0)


def gathered(cache: LayerCache, index: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values at `token_index`, each [keys, num_kv_heads, head_dim]."""
    block, offset = index
    # One copy, to [keys, 2, num_kv_heads, head_dim].
    keys, values = cache.buffer[block, :, :, offset].unbind(1)
    return keys, values


def token_index(metadata: StepMetadata, block_size: int, device: torch.device) -> list[Tensor]:
    """Block and offset of each key of the long rows, one row after the other: [keys] int64 each."""
    rows = range(metadata.num_single_rows, metadata.num_rows)
    places = [np.divmod(np.arange(metadata.seqlen_k[row]), block_size) for row in rows]
    blocks = [metadata.block_table[row, page] for row, (page, _) in zip(rows, places, strict=True)]
    return stage([np.concatenate(blocks), np.concatenate([offset for _, offset in places])], device)


def _is_offered(needs: AttentionNeeds) -> bool:
    return (
        needs.device_type == "cuda"
        and needs.dtype in DTYPES
        and needs.cache_dtype is None
        and all(head_dim % 8 == 0 and head_dim <= LARGEST_HEAD for head_dim in needs.head_dims)
        and not (needs.has_softcap or needs.has_alibi)
        and torch.version.hip is None
        and torch.cuda.get_device_capability() >= LEAST_CAPABILITY
        and computes(needs.dtype, by_tables=False)
    )


def _attend(*arguments: Any, **options: Any) -> Tensor:
    # Arguments for two releases of torch; neither release's type hints accept both.
    operator: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    attended: Tensor = operator(*arguments, **options)
    return attended


@functools.cache
def computes(dtype: torch.dtype, by_tables: bool, device: str = "cuda") -> bool:
    """Whether three tokens with four query and two K/V heads equal SDPA's, packed or in the third page of a cache."""
    generator = torch.Generator().manual_seed(5)
    query, keys, values = (torch.randn((3, heads, 64), generator=generator).to(device, dtype) for heads in (4, 2, 2))
    ends = torch.tensor([0, 3], dtype=torch.int32).to(device)
    tensors: tuple[Tensor | None, ...] = (keys, values, ends, ends)
    paged: dict[str, Tensor] = {}
    if by_tables:
        cache = torch.zeros((3, 2, 2, PAGE, 64), dtype=dtype, device=device)
        cache[2, :, :, :3] = torch.stack((keys, values)).transpose(1, 2)
        tensors = (*LayerCache(cache).pages(), ends, None)
        paged = {"seqused_k": ends[1:], "block_table": torch.tensor([[2]], dtype=torch.int32).to(device)}
    masks = {"scale": 64**-0.5, "window_size": (-1, 0)}
    try:
        attended = _attend(query, *tensors, 3, PAGE if by_tables else 3, **masks, **_GROUPED, **paged)
    except (RuntimeError, ValueError, TypeError) as error:
        logger.warning("torch's varlen attention does not work here, so it is not used: %s", first_line(error))
        return False
    queries, keys, values = (tensor.transpose(0, 1)[None].float() for tensor in (query, keys, values))
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return torch.allclose(attended.float(), expected[0].transpose(0, 1), atol=3e-2, rtol=3e-2)
