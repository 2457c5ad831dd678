"""The compiled operators against plain torch; what torch itself checks of a custom operator."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from reference_server.model_server.attention import compiled_backend
from reference_server.model_server.attention.compiled_backend import CompiledDecode, CompiledPrefill
from reference_server.model_server.attention.kernel import AttentionOptions
from reference_server.model_server.attention.store import CompiledStore, TorchStore
from reference_server.model_server.attention.torch_backend import TorchDecode, TorchPrefill
from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.memory.kv_cache import UNSCALED, KVScales, LayerCache
from reference_server.model_server.models.fused.operators import CompiledOperators, Norm, TorchOperators
from reference_server.model_server.models.fused.packed_linear import in_panels
from reference_server.model_server.step_state import Step, StepMetadata, StepTensors

kernels = build.kernels()
pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="there is no C++ compiler")
multiplies = pytest.mark.skipif(not hasattr(kernels, "linear"), reason="this processor has no bfloat16 product")
BF16, FP32 = torch.bfloat16, torch.float32
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
# Sums in another order: over 600 cases the compiled attention is 6e-7 off the one in float64 at most, torch's 1.3e-6.
TOLERANCE = {FP32: 2e-6, BF16: 2e-2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def test_with_a_compiler_the_kernels_build_and_load() -> None:
    assert kernels is not None


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="this system has no /proc/cpuinfo")
def test_every_operator_for_the_instructions_of_this_processor_is_there() -> None:
    """Otherwise the tests of an operator are skipped where it is broken."""
    flags = set(Path("/proc/cpuinfo").read_text().split())

    has_product = "avx512_bf16" in flags or {"avx2", "fma"} <= flags
    expected = {"linear", "walk", "adapters"} if has_product else set()
    if {"avx512_bf16", "avx512vbmi"} <= flags:
        expected.add("float8_linear")
    if "avx512_vnni" in flags:
        expected.add("integer_linear_vnni")
    elif {"avx2", "fma", "f16c"} <= flags:
        expected.add("integer_linear_avx2")
    assert {name for name in expected if not hasattr(kernels, name)} == set()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("head_dim", [20, 32, 64, 96, 128])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (6, 1)])
@pytest.mark.parametrize(
    ("window", "softcap", "alibi"), [(None, None, False), (7, None, False), (None, 3.0, False), (9, None, True)]
)
def test_decode_equals_the_torch_backend(
    dtype: torch.dtype, head_dim: int, heads: tuple[int, int], window: int | None, softcap: float | None, alibi: bool
) -> None:
    num_heads, num_kv_heads = heads
    slopes = torch.rand(num_heads) if alibi else None
    options = AttentionOptions(head_dim**-0.5, window, softcap, slopes)
    cache = torch.randn(12, 2, num_kv_heads, 16, head_dim).to(dtype)
    query = torch.randn(3, num_heads, head_dim).to(dtype)
    step = step_of([1, 16, 45])
    results = [kernel(query, LayerCache(cache), step, options) for kernel in (CompiledDecode(), TorchDecode())]

    torch.testing.assert_close(results[0], results[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("head_dim", [20, 64])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (20, 1)])
@pytest.mark.parametrize(
    ("window", "softcap", "alibi"), [(None, None, False), (7, None, False), (None, 3.0, False), (9, None, True)]
)
def test_prefill_equals_the_torch_backend(
    dtype: torch.dtype, head_dim: int, heads: tuple[int, int], window: int | None, softcap: float | None, alibi: bool
) -> None:
    num_heads, num_kv_heads = heads
    options = AttentionOptions(head_dim**-0.5, window, softcap, torch.rand(num_heads) if alibi else None)
    cache = torch.randn(12, 2, num_kv_heads, 16, head_dim).to(dtype)
    # A decode row, a whole prompt, the end of one, and a chunk that begins within a page.
    rows = replace(metadata([3, 20, 45, 40]), seqlen_q=np.array([1, 20, 2, 29]), num_single_rows=1)
    step = Step(rows, StepTensors.of_host(rows))
    query = torch.randn(20 + 2 + 29, num_heads, head_dim).to(dtype)

    found, expected = (
        kernel(query, LayerCache(cache), step, options) for kernel in (CompiledPrefill(), TorchPrefill())
    )

    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_long_prompt_without_a_mask_goes_through_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_backend, "SDPA_KEYS", 19)
    cache, query = LayerCache(torch.randn(12, 2, 2, 16, 32)), torch.randn(20, 4, 32)
    rows = replace(metadata([20]), seqlen_q=np.array([20]), num_single_rows=0)
    step = Step(rows, StepTensors.of_host(rows))
    options = AttentionOptions(0.2)

    assert torch.equal(CompiledPrefill()(query, cache, step, options), TorchPrefill()(query, cache, step, options))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_store_equals_the_torch_backend(dtype: torch.dtype) -> None:
    caches = [torch.zeros(12, 2, 2, 16, 24).to(dtype) for _ in range(2)]
    key_value = torch.randn(2, 3, 2, 24).to(dtype).transpose(0, 1)

    for store, cache in zip((CompiledStore(), TorchStore()), caches, strict=True):
        store(key_value, LayerCache(cache), step_of([1, 16, 45]))

    assert torch.equal(*caches)


@pytest.mark.parametrize("stored", FLOAT8)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("scales", [UNSCALED, KVScales(0.37, 1.7)])
def test_an_eight_bit_store_equals_the_torch_backend(dtype: torch.dtype, stored: torch.dtype, scales: KVScales) -> None:
    caches = [torch.zeros(4096, 2, 1, 16, 16).to(stored) for _ in range(2)]
    slots = np.random.default_rng(3).permutation(4096 * 16)
    # Magnitudes from below the smallest to beyond the largest value of both types.
    spread = torch.randn(len(slots), 2, 1, 16) * torch.exp2(torch.randint(-24, 20, (len(slots), 2, 1, 16)))
    key_value = spread.to(dtype)
    key_value[0, :, 0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    rows = replace(metadata([1]), slots=slots)

    for store, cache in zip((CompiledStore(), TorchStore()), caches, strict=True):
        store(key_value, LayerCache(cache, scales), Step(rows, StepTensors.of_host(rows)))

    found, expected = (cache.float() for cache in caches)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert int(found.isnan().sum()) == 2


@pytest.mark.parametrize("stored", FLOAT8)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("head_dim", [20, 64, 128])
@pytest.mark.parametrize("window", [None, 70])
def test_attention_over_eight_bits_has_the_bits_of_the_widened_cache(
    dtype: torch.dtype, stored: torch.dtype, block_size: int, head_dim: int, window: int | None
) -> None:
    lengths = np.array([1, 45, 277, 300])
    cache = torch.randn(2 + 300 // block_size, 2, 2, block_size, head_dim).to(stored)
    options = AttentionOptions(head_dim**-0.5, window)
    table = np.stack([np.random.default_rng(row).permutation(len(cache)) for row in range(len(lengths))])
    rows = replace(
        metadata([1]), block_table=table, seqlen_k=lengths, seqlen_q=np.array([1, 1, 1, 40]), num_single_rows=3
    )
    step = Step(rows, StepTensors.of_host(rows))
    single, query = torch.randn(3, 6, head_dim).to(dtype), torch.randn(40, 6, head_dim).to(dtype)

    for kernel, own in ((CompiledDecode(), single), (CompiledPrefill(), query)):
        found, expected = (kernel(own, LayerCache(each), step, options) for each in (cache, cache.to(dtype)))
        assert torch.equal(found, expected)


@multiplies
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 12, 13, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (48, 33), (192, 576), (2048, 160)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_equals_the_one_in_float64(rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    weight, hidden = (torch.randn(size, inputs).to(BF16) for size in (outputs, rows))
    bias = torch.randn(outputs).to(BF16) if has_bias else None
    expected = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())

    found = torch.ops.reference_server_cpu.linear(hidden, in_panels(weight), bias, outputs)

    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5 * inputs)


@multiplies
@pytest.mark.parametrize("outputs", [96, 2080], ids=["in the cache", "from memory"])
def test_a_rows_product_does_not_depend_on_the_rows_beside_it(outputs: int) -> None:
    weight, hidden = torch.randn(outputs, 256).to(BF16), torch.randn(40, 256).to(BF16)
    packed = in_panels(weight)
    together = torch.ops.reference_server_cpu.linear(hidden, packed, None, outputs)

    for rows in (1, 2, 3, 4, 7, 12, 13):
        alone = torch.ops.reference_server_cpu.linear(hidden[:rows], packed, None, outputs)
        assert torch.equal(alone, together[:rows])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_operators_between_products_equal_torch(dtype: torch.dtype) -> None:
    norm, head_norm = Norm(torch.rand(48).to(dtype), 1e-5), Norm(torch.rand(24).to(dtype), 1e-6)
    table = torch.randn(50, 2, 16).to(dtype)
    tokens = [torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype), torch.randn(5, 4, 24).to(dtype)]
    results = []
    for operators in (CompiledOperators(kernels), TorchOperators()):
        residual, delta, heads = (tensor.clone() for tensor in tokens)
        normed = operators.add_norm(residual, delta, norm)
        operators.norm_heads(heads[:, :2], head_norm)
        operators.rotate(heads[:, 1:], table, torch.tensor([0, 3, 49, 7, 1]))
        results.append((residual, normed, heads, operators.silu_mul(normed)))

    torch.testing.assert_close(results[0], results[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_norm_of_part_of_a_wider_product_equals_torch(dtype: torch.dtype) -> None:
    norm, wide = Norm(torch.rand(48).to(dtype), 1e-5), torch.randn(5, 80).to(dtype)

    found, expected = (
        operators.add_norm(wide[:, 16:64], None, norm) for operators in (CompiledOperators(kernels), TorchOperators())
    )

    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_norm_whose_weight_has_another_type_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the weight must have the input's type"):
        CompiledOperators(kernels).add_norm(torch.randn(2, 32).to(BF16), None, Norm(torch.ones(32), 1e-5))


def test_the_exponential_is_accurate_over_its_whole_range() -> None:
    gate = torch.linspace(-100, 100, 4001)[None]
    up = torch.ones_like(gate)

    found = CompiledOperators(kernels).silu_mul(torch.cat((gate, up), 1))

    torch.testing.assert_close(found, F.silu(gate), rtol=1e-6, atol=1e-36)


def test_nan_stays_nan() -> None:
    operators = CompiledOperators(kernels)
    broken = torch.full((1, 32), float("nan"))

    assert operators.silu_mul(broken).isnan().all()
    assert operators.add_norm(broken.clone(), None, Norm(torch.ones(32), 1e-5)).isnan().all()
    cache = LayerCache(torch.zeros(12, 2, 1, 16, 32))
    assert CompiledDecode()(broken.view(1, 1, 32), cache, step_of([20]), AttentionOptions(1.0)).isnan().all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("count", [1, 7, 255, 256, 257, 1000, 40_000])
def test_the_best_id_and_its_logprob_equal_torch(dtype: torch.dtype, count: int) -> None:
    # bfloat16 has many equals. Rows are apart, and one has excluded ids.
    logits = (4 * torch.randn(5, count + 3)).to(dtype)[:, :count]
    logits[1, : count // 2] = -torch.inf
    logits[2] = 3.0

    ids, logprobs = kernels.greedy(logits)

    assert ids.tolist() == logits.float().numpy().argmax(-1).tolist()
    expected = logits.double().log_softmax(-1).max(-1).values
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_without_a_finite_distribution_has_no_logprob(broken: float) -> None:
    logits = torch.randn(3, 600)
    logits[0, 500] = broken
    logits[1] = -torch.inf

    ids, logprobs = kernels.greedy(logits)

    assert logprobs.isfinite().tolist() == [False, False, True]
    assert all(0 <= id_ < 600 for id_ in ids.tolist())


CALLS: dict[str, tuple[Any, ...]] = {
    "attend_decode": (torch.randn(2, 4, 16), torch.randn(3, 2, 2, 16, 16), torch.tensor([[1], [2]]),
                      torch.tensor([3, 16]), 0.25, 0, 0.0, None),
    "attend_prefill": (torch.randn(3, 4, 16), torch.randn(3, 2, 2, 16, 16), torch.tensor([[1], [2]]),
                       torch.tensor([1, 2]), torch.tensor([3, 16]), 0.25, 0, 0.0, None),
    "store": (torch.zeros(3, 2, 2, 16, 16), torch.randn(2, 2, 2, 16), torch.tensor([16, 40]), 1.0, 1.0),
    "add_norm": (torch.randn(2, 32), torch.randn(2, 32), torch.rand(32), None, 1e-5, False),
    "norm_heads": (torch.randn(2, 4, 16), torch.rand(16), 1e-5),
    "rotate": (torch.randn(2, 4, 16), torch.randn(8, 2, 16), torch.tensor([1, 5])),
    "silu_mul": (torch.randn(2, 32),),
    "greedy": (torch.randn(2, 32),),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_operator_passes_torchs_checks(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.reference_server_cpu, name).default, CALLS[name])


@multiplies
def test_the_product_passes_torchs_checks() -> None:
    packed = in_panels(torch.randn(40, 32).to(BF16))

    torch.library.opcheck(
        torch.ops.reference_server_cpu.linear.default, (torch.randn(3, 32).to(BF16), packed, None, 40)
    )


def metadata(lengths: list[int]) -> StepMetadata:
    """Decode rows of these lengths, over blocks in descending order."""
    blocks = iter(range(11, 0, -1))
    table = np.zeros((len(lengths), 4), dtype=np.int64)
    for row, length in zip(table, lengths, strict=True):
        count = -(-length // 16)
        row[:count] = [next(blocks) for _ in range(count)]
    last = np.array(lengths, dtype=np.int64) - 1
    return StepMetadata(
        slots=table[np.arange(len(lengths)), last // 16] * 16 + last % 16,
        block_table=table,
        seqlen_q=np.ones(len(lengths), dtype=np.int64),
        seqlen_k=last + 1,
        num_single_rows=len(lengths),
    )


def step_of(lengths: list[int]) -> Step:
    return Step(metadata(lengths), StepTensors.of_host(metadata(lengths)))
