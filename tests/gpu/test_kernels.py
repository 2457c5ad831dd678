"""Every kernel of this GPU against dense float64 and plain torch."""

import pytest
import torch

from reference_server.model_server.attention import select
from reference_server.model_server.attention.conformance import CASES, ROWS, ConformanceCase, run
from reference_server.model_server.attention.kernel import AttentionNeeds
from reference_server.model_server.attention.select import AttentionBackend
from reference_server.model_server.attention.store import TorchStore
from reference_server.model_server.attention.torch_backend import TorchDecode, TorchPrefill
from reference_server.model_server.measure.correctness import LIMITS, SHAPES
from reference_server.model_server.models.adapters.products import product_for
from reference_server.model_server.models.fused.operators import Norm, TorchOperators, TritonOperators
from reference_server.model_server.options import EngineOptions
from tests.support.models import adapter_products

pytestmark = pytest.mark.gpu

DEVICE_BACKENDS = [select.FLASH, select.VARLEN, select.TRITON, select.FLASHINFER]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("case", [*CASES.values(), *SHAPES.values()], ids=[*CASES, *SHAPES])
@pytest.mark.parametrize("each", DEVICE_BACKENDS, ids=lambda each: each.name)
def test_a_backend_computes_every_case_it_supports(
    each: AttentionBackend, case: ConformanceCase, dtype: torch.dtype, gpu: torch.device
) -> None:
    needs = case.needs(gpu, dtype)
    pairs = {"prefill": (each.prefill, TorchDecode, TorchStore), "decode": (TorchPrefill, each.decode, each.store)}
    for phase, (prefill, decode, store) in pairs.items():
        if decode is None or not (prefill if phase == "prefill" else decode).supports(needs):
            continue

        outcome = run(prefill(), decode(), store(), case, ROWS[phase], gpu, dtype)

        assert outcome.relative_error <= LIMITS[dtype], phase


@pytest.mark.parametrize("case", [*CASES.values(), *SHAPES.values()], ids=[*CASES, *SHAPES])
def test_every_case_has_a_kernel_other_than_plain_torch(case: ConformanceCase, gpu: torch.device) -> None:
    """Prefill and decode have a GPU kernel for every mask; graphs can capture that of decode."""
    needs = AttentionNeeds(
        gpu.type,
        torch.bfloat16,
        frozenset({case.head_dim}),
        has_window=case.window is not None,
        has_softcap=case.softcap is not None,
        has_alibi=case.alibi,
    )

    choice = select.choose(EngineOptions("model"), needs)

    assert "torch" not in (choice.prefill.name, choice.decode.name)
    assert choice.decode.is_capturable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [192, 2048, 4096])
def test_operators_between_products_equal_those_of_torch(hidden: int, dtype: torch.dtype, gpu: torch.device) -> None:
    generator = torch.Generator(gpu).manual_seed(2)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=gpu).to(dtype)

    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    ours, theirs = TritonOperators(), TorchOperators()
    for norm in (Norm(drawn(hidden), 1e-5), Norm(drawn(hidden), 1e-5, drawn(hidden), centered=True)):
        residuals = [drawn(5, hidden)]
        residuals.append(residuals[0].clone())
        delta = drawn(5, hidden)
        normed = [
            each.add_norm(residual, delta, norm) for each, residual in zip((ours, theirs), residuals, strict=True)
        ]
        torch.testing.assert_close(normed[0], normed[1], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(residuals[0], residuals[1], atol=tolerance, rtol=tolerance)
    heads, table, positions = drawn(5, 6, 64), drawn(9, 2, 64), torch.tensor([0, 8, 3, 1, 1], device=gpu)
    turned = [heads.clone(), heads.clone()]
    for each, own in zip((ours, theirs), turned, strict=True):
        each.norm_heads(own, Norm(drawn(64) * 0 + 1, 1e-6))
        each.rotate(own, table, positions)
    torch.testing.assert_close(turned[0], turned[1], atol=4 * tolerance, rtol=tolerance)
    gate_up = drawn(5, 2 * hidden)
    torch.testing.assert_close(ours.silu_mul(gate_up), theirs.silu_mul(gate_up.clone()), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("tokens", "inputs"), adapter_products.SHAPES)
def test_adapters_have_triton_kernels_that_equal_dense_products(
    tokens: int, inputs: int, dtype: torch.dtype, gpu: torch.device
) -> None:
    product = product_for(torch.empty(0, dtype=dtype, device=gpu), ())

    outcome = adapter_products.run(product, tokens, inputs, dtype, gpu)

    assert product.name == "triton"
    assert outcome.relative_error <= LIMITS[dtype]
    assert outcome.untouched
