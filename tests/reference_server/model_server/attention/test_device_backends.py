"""Kernels of other packages, replaced by doubles with their signatures that compute densely on a CPU.

Tested are the tensors that we pass under each name: tables, lengths, windows, gathered pages.
"""

import importlib
import importlib.util
import inspect
import pkgutil
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_server.model_server.attention import (
    flash_backend,
    flashinfer_backend,
    select,
    triton_backend,
    varlen_backend,
)
from reference_server.model_server.attention.conformance import ROWS, ConformanceCase, ConformanceResult, Rows, run
from reference_server.model_server.attention.kernel import AttentionKernel, AttentionNeeds
from reference_server.model_server.attention.staging import upload
from reference_server.model_server.attention.store import TorchStore
from reference_server.model_server.attention.torch_backend import TorchDecode
from reference_server.model_server.options import EngineOptions

CPU = torch.device("cpu")
COMPUTES = varlen_backend.computes.__wrapped__


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: tuple[int, int], softcap: float, slopes: Any
) -> Tensor:
    """query: [seqlen_q, num_heads, head_dim] at the end of keys. window: bounds that leave the query itself out."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    distance = torch.arange(len(keys))[None] - torch.arange(len(keys) - len(query), len(keys))[:, None]
    if slopes is not None:
        scores = scores + slopes.view(-1, 1, 1) * distance
    hidden = distance > window[1]
    if window[0] >= 0:
        hidden |= distance < -window[0]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def of_row(pages: Tensor, table: Tensor, length: int) -> Tensor:
    return pages[table.long()].flatten(0, 1)[:length]


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float = 1.0, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Any = None,
) -> Tensor:  # fmt: skip
    assert causal
    assert block_table.dtype == cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_k.diff().tolist()
    assert max(lengths) == max_seqlen_k
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    queries = q.split(cu_seqlens_q.diff().tolist())
    masks = (softmax_scale, (window_size[0], 0), softcap, alibi_slopes)
    return torch.cat([
        attend(query, of_row(k, table, n), of_row(v, table, n), *masks)
        for query, table, n in zip(queries, block_table, lengths, strict=True)
    ])  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    block_table: Any = None, softmax_scale: float = 1.0, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Tensor:  # fmt: skip
    assert causal
    masks = (softmax_scale, (window_size[0], 0), softcap, alibi_slopes)
    return torch.stack([
        attend(query, of_row(k_cache, table, n), of_row(v_cache, table, n), *masks)
        for query, table, n in zip(q, block_table, cache_seqlens.tolist(), strict=True)
    ])  # fmt: skip


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Any, max_q: int, max_k: int, *,
    scale: float = 1.0, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: Any = None,
    block_table: Any = None,
) -> Tensor:  # fmt: skip
    queries = query.split(cu_seq_q.diff().tolist())
    if block_table is None:
        pairs = list(zip(key.split(cu_seq_k.diff().tolist()), value.split(cu_seq_k.diff().tolist()), strict=True))
    else:
        assert cu_seq_k is None
        assert key.shape[1] % 256 == 0
        rows = list(zip(block_table, seqused_k.tolist(), strict=True))
        pairs = [(of_row(key, table, n), of_row(value, table, n)) for table, n in rows]
    assert max(len(keys) for keys, _ in pairs) <= max_k
    return torch.cat([
        attend(each, keys, values, scale, window_size, 0.0, None)
        for each, (keys, values) in zip(queries, pairs, strict=True)
    ])  # fmt: skip


class FlashInferWrapper:
    """Shared by both wrappers of flashinfer: a plan of page lists, then runs."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert kv_layout == "HND"
        self.uses_tensor_cores = use_tensor_cores

    def keep(self, starts: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, page: int, *masks: Any) -> None:
        counts = indptr.diff()
        assert all(each.dtype == torch.int32 and not each.is_cuda for each in (starts, indptr, indices, last))
        self.sizes = starts.diff().tolist()
        self.tables = indices.split(counts.tolist())
        self.lengths = ((counts - 1) * page + last).tolist()
        self.masks = masks

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        keys, values = (half.transpose(1, 2) for half in paged_kv_cache.unbind(1))
        scale, window_left, softcap = self.masks
        return torch.cat([
            attend(query, of_row(keys, table, n), of_row(values, table, n), scale, (window_left, 0), softcap, None)
            for query, table, n in zip(q.split(self.sizes), self.tables, self.lengths, strict=True)
        ])  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(FlashInferWrapper):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
        sm_scale: Any = None, window_left: int = -1, logits_soft_cap: Any = None, q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert causal
        lists = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.keep(qo_indptr, *lists, page_size, sm_scale, window_left, logits_soft_cap or 0.0)


class BatchDecodeWithPagedKVCacheWrapper(FlashInferWrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, window_left: int = -1, logits_soft_cap: Any = None,
        q_data_type: Any = "float16", kv_data_type: Any = None, sm_scale: Any = None,
    ) -> None:  # fmt: skip
        starts = torch.arange(len(indptr), dtype=torch.int32)
        assert self.uses_tensor_cores == (num_qo_heads // num_kv_heads not in (1, 2, 4, 8))
        self.keep(starts, indptr, indices, last_page_len, page_size, sm_scale, window_left, logits_soft_cap or 0.0)


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=flash_attn_with_kvcache
    )
    monkeypatch.setattr(flash_backend, "package", lambda: package)
    monkeypatch.setattr(varlen_backend, "_attend", varlen_attn)
    monkeypatch.setattr(varlen_backend, "computes", lambda dtype, by_tables: True)
    wrappers = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    )
    monkeypatch.setattr(flashinfer_backend, "package", lambda: wrappers)


def outcome_of(
    prefill: AttentionKernel, decode: AttentionKernel, case: ConformanceCase, rows: Rows
) -> ConformanceResult:
    """With the tensors that an accelerator gets, and torch's store."""
    return run(prefill, decode, TorchStore(), case, rows, CPU, make_tensors=partial(upload, device=CPU))


MASKS = {
    "grouped": ConformanceCase(num_kv_heads=2, block_size=256),
    "window": ConformanceCase(num_kv_heads=2, block_size=256, window=6),
    "softcap": ConformanceCase(block_size=256, softcap=1.5),
    "alibi": ConformanceCase(block_size=256, alibi=True),
}


@pytest.mark.parametrize("case", MASKS.values(), ids=MASKS.keys())
def test_flash_attn_gets_the_arguments_that_it_accepts(case: ConformanceCase) -> None:
    outcome = outcome_of(flash_backend.FlashPrefill(), flash_backend.FlashDecode(), case, ROWS["mixed"])

    assert outcome.relative_error < 1e-5


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "case",
    [
        ConformanceCase(num_kv_heads=2, block_size=1),
        ConformanceCase(num_heads=6, num_kv_heads=2, block_size=1),
        ConformanceCase(num_kv_heads=2, block_size=16, window=6),
        ConformanceCase(block_size=1, softcap=1.5),
    ],
    ids=["grouped", "groups of three", "window", "softcap"],
)
def test_flashinfer_gets_the_arguments_that_it_accepts(case: ConformanceCase, rows: str) -> None:
    kernels = flashinfer_backend.FlashInferPrefill(), flashinfer_backend.FlashInferDecode()

    outcome = outcome_of(*kernels, case, ROWS[rows])

    assert outcome.relative_error < 1e-5


def test_the_double_of_varlen_has_the_arguments_of_this_torch() -> None:
    # Its module imports torch's compiler.
    operator = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    theirs, ours = inspect.signature(operator).parameters, inspect.signature(varlen_attn).parameters
    by_place = [name for name, each in ours.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]

    assert list(theirs)[: len(by_place)] == by_place
    # torch 2.11 has no tables, and no word for grouped heads.
    added = {"enable_gqa", "seqused_k", "block_table"}
    assert set(ours) - set(theirs) <= (set() if "block_table" in theirs else added)


@pytest.mark.parametrize(
    ("name", "double"),
    [
        ("flash_attn.flash_attn_varlen_func", flash_attn_varlen_func),
        ("flash_attn.flash_attn_with_kvcache", flash_attn_with_kvcache),
        ("flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan", BatchPrefillWithPagedKVCacheWrapper.plan),
        ("flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan", BatchDecodeWithPagedKVCacheWrapper.plan),
    ],
)
def test_the_doubles_have_the_arguments_of_the_packages(name: str, double: Any) -> None:
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    theirs = list(inspect.signature(pkgutil.resolve_name(name)).parameters)
    ours = inspect.signature(double).parameters
    by_place = [each for each, parameter in ours.items() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]

    assert theirs[: len(by_place)] == by_place
    assert set(ours) <= set(theirs)


@pytest.mark.parametrize("name", ["grouped", "window"])
def test_varlen_reads_tables_where_it_can(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(varlen_backend, "READS_TABLES", True)

    outcome = outcome_of(varlen_backend.VarlenPrefill(), varlen_backend.VarlenDecode(), MASKS[name], ROWS["mixed"])

    assert outcome.relative_error < 1e-5


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("reads_tables", [True, False])
def test_varlen_gathers_pages_that_it_cannot_read(
    monkeypatch: pytest.MonkeyPatch, block_size: int, reads_tables: bool
) -> None:
    monkeypatch.setattr(varlen_backend, "READS_TABLES", reads_tables)
    case = ConformanceCase(num_kv_heads=2, block_size=block_size)

    outcome = outcome_of(varlen_backend.VarlenPrefill(), TorchDecode(), case, ROWS["mixed"])

    assert outcome.relative_error < 1e-5


@pytest.mark.parametrize("by_tables", [False, True])
def test_varlen_is_used_only_if_a_trial_is_correct(monkeypatch: pytest.MonkeyPatch, by_tables: bool) -> None:
    seen: list[set[str]] = []

    def twice(*args: Any, **named: Any) -> Tensor:
        return 2 * varlen_attn(*args, **named)

    def right(*args: Any, **named: Any) -> Tensor:
        seen.append({name for name, value in named.items() if isinstance(value, Tensor)})
        return varlen_attn(*args, **named)

    def refuse(*args: Any, **named: Any) -> Tensor:
        raise RuntimeError("no such kernel\nadvice")

    found = []
    for each in (right, twice, refuse):
        monkeypatch.setattr(varlen_backend, "_attend", each)
        found.append(COMPUTES(torch.float32, by_tables, device="cpu"))

    assert found == [True, False, False]
    assert seen == [{"seqused_k", "block_table"} if by_tables else set()]


def test_a_gpu_takes_the_first_backend_of_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_backend, "_is_offered", lambda needs: False)
    monkeypatch.setattr(varlen_backend, "_is_offered", lambda needs: not needs.has_alibi)
    monkeypatch.setattr(triton_backend, "is_offered", lambda needs: True)
    monkeypatch.setattr(varlen_backend, "READS_TABLES", False)
    needs = AttentionNeeds("cuda", torch.bfloat16, frozenset({128}))

    llama = select.choose(EngineOptions("m"), needs)
    bloom = select.choose(EngineOptions("m"), AttentionNeeds("cuda", torch.bfloat16, frozenset({64}), has_alibi=True))
    paged = select.choose(EngineOptions("m", attention="paged"), needs)

    assert (llama.prefill.name, llama.decode.name) == ("varlen", "triton")
    assert (bloom.prefill.name, bloom.decode.name, bloom.block_size) == ("triton", "triton", 16)
    assert (paged.block_size, paged.impl) == (16, "paged")
