"""Paged attention by `torch.nn.attention.varlen`, torch's own flash attention: CUDA, 16-bit, no softcap, no ALiBi.

From torch 2.12 the operator reads block tables and serves both phases. Before, it serves prompts: their keys and values
are gathered from the cache first, one copy beside which the attention of a prompt is long. What the operator takes is
read off its signature, and whether it computes grouped heads, packed and by tables, is tried on the device.
"""

import functools
import inspect
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from reference_server.model_server.attention import triton_backend
from reference_server.model_server.attention.staging import on_device, stage
from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions
from reference_server.model_server.device import first_line

if TYPE_CHECKING:
    from reference_server.model_server.attention.backend import AttentionNeeds

logger = logging.getLogger(__name__)

PAGE = 256
DTYPES = (torch.float16, torch.bfloat16)
LEAST_CAPABILITY = (8, 0)
LARGEST_HEAD = 256

PARAMETERS = frozenset(inspect.signature(varlen.varlen_attn).parameters)
READS_TABLES = "block_table" in PARAMETERS
# torch 2.11 has no such argument and checks no head counts.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in PARAMETERS else {}
# Its arguments are another release's too, so no release's types are held against them.
_attend: Any = varlen.varlen_attn


class VarlenPrefill:
    """Several query tokens a row."""

    name = "varlen"
    block_size = PAGE if READS_TABLES else triton_backend.TritonPrefill.block_size
    is_capturable = False

    def supports(self, needs: "AttentionNeeds", /) -> bool:
        return _is_offered(needs)

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        placed = on_device(metadata, cache.device)
        rows = slice(metadata.num_decode_rows, None)
        max_q, max_k = int(metadata.seqlen_q[rows].max()), int(metadata.seqlen_k[rows].max())
        if READS_TABLES and cache.shape[3] % PAGE == 0 and computes(query.dtype, by_tables=True):
            keys, values = pages(cache)
            paged: dict[str, Tensor] = {"seqused_k": placed.seqlen_k[rows], "block_table": placed.block_table[rows]}
            cu_seqlen_k = None
        else:
            keys, values = gathered(cache, metadata)
            paged, cu_seqlen_k = {}, placed.cu_seqlen_k
        attended: Tensor = _attend(
            *(query.contiguous(), keys, values, placed.cu_seqlen_q, cu_seqlen_k, max_q, max_k),
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
    store = staticmethod(triton_backend.store)

    def supports(self, needs: "AttentionNeeds", /) -> bool:
        return (
            READS_TABLES
            and (needs.block_size or PAGE) % PAGE == 0
            and _is_offered(needs)
            and triton_backend.is_offered(needs)
            and computes(needs.dtype, by_tables=True)
        )

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        placed = on_device(metadata, cache.device)
        keys, values = pages(cache)
        rows = len(query)
        key = ("one token a row", rows)
        cu_seqlen_q = metadata.step_memo.get(key)
        if cu_seqlen_q is None:
            cu_seqlen_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
            metadata.step_memo[key] = cu_seqlen_q
        # The most that the tables hold, not what the rows have: a captured graph serves every length.
        max_k = placed.block_table.shape[1] * cache.shape[3]
        attended: Tensor = _attend(
            *(query.contiguous(), keys, values, cu_seqlen_q, None, 1, max_k),
            scale=options.scaling,
            window_size=window_of(options),
            seqused_k=placed.seqlen_k[:rows],
            block_table=placed.block_table[:rows],
            **_GROUPED,
        )
        return attended


def window_of(options: AttentionOptions) -> tuple[int, int]:
    """The operator's bounds leave the query itself out; (-1, 0) is causal without a window."""
    return (-1 if options.window is None else options.window - 1, 0)


def pages(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as the operators see a paged cache: [blocks, block_size, num_kv_heads, head_dim], no copy."""
    keys, values = cache.unbind(1)
    return keys.transpose(1, 2), values.transpose(1, 2)


def gathered(cache: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """Keys and values of the rows of several tokens, one row after the other: [keys, num_kv_heads, head_dim]."""
    block_size = cache.shape[3]
    index = metadata.step_memo.get("gathered")
    if index is None:
        rows = range(metadata.num_decode_rows, metadata.num_rows)
        places = [np.divmod(np.arange(metadata.seqlen_k[row]), block_size) for row in rows]
        blocks = [metadata.block_table[row, page] for row, (page, _) in zip(rows, places, strict=True)]
        arrays = [np.concatenate(blocks), np.concatenate([offset for _, offset in places])]
        index = metadata.step_memo["gathered"] = stage(arrays, cache.device)
    block, offset = index
    # One copy, to [keys, 2, num_kv_heads, head_dim].
    keys, values = cache[block, :, :, offset].unbind(1)
    return keys, values


def _is_offered(needs: "AttentionNeeds") -> bool:
    return (
        needs.device_type == "cuda"
        and needs.dtype in DTYPES
        and all(head_dim % 8 == 0 and head_dim <= LARGEST_HEAD for head_dim in needs.head_dims)
        and not (needs.has_softcap or needs.has_alibi)
        and torch.version.hip is None
        and torch.cuda.get_device_capability() >= LEAST_CAPABILITY
        and computes(needs.dtype, by_tables=False)
    )


@functools.cache
def computes(dtype: torch.dtype, by_tables: bool, device: str = "cuda") -> bool:
    """Whether three tokens of four heads on two give what SDPA gives, packed or in the third page of a cache."""
    generator = torch.Generator().manual_seed(5)
    query, keys, values = (torch.randn((3, heads, 64), generator=generator).to(device, dtype) for heads in (4, 2, 2))
    ends = torch.tensor([0, 3], dtype=torch.int32).to(device)
    given: tuple[Tensor | None, ...] = (keys, values, ends, ends)
    paged: dict[str, Tensor] = {}
    if by_tables:
        cache = torch.zeros((3, 2, 2, PAGE, 64), dtype=dtype, device=device)
        cache[2, :, :, :3] = torch.stack((keys, values)).transpose(1, 2)
        given = (*pages(cache), ends, None)
        paged = {"seqused_k": ends[1:], "block_table": torch.tensor([[2]], dtype=torch.int32).to(device)}
    masks = {"scale": 64**-0.5, "window_size": (-1, 0)}
    try:
        attended = _attend(query, *given, 3, PAGE if by_tables else 3, **masks, **_GROUPED, **paged)
    except (RuntimeError, ValueError, TypeError) as error:
        logger.warning("torch's varlen attention does not compute here, so it is left out: %s", first_line(error))
        return False
    queries, keys, values = (tensor.transpose(0, 1)[None].float() for tensor in (query, keys, values))
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return torch.allclose(attended.float(), expected[0].transpose(0, 1), atol=3e-2, rtol=3e-2)
