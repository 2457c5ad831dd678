"""Eight-bit weights: rounding errors are at most half a step, conversion is exact, any number of rows works."""

import pytest
import torch

from reference_server.model_server.quantization import fp8, int8
from reference_server.model_server.quantization.integers import float_products

WEIGHT = torch.randn(48, 64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_float8_value_is_converted_exactly(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    finite = bits[(bits & 0x7F) != 0x7F].view(torch.float8_e4m3fn)

    assert torch.equal(fp8.widened(finite, dtype), finite.to(dtype))


def test_int8_rounds_to_the_nearest_step_of_each_output() -> None:
    product = int8.round_to_int8(WEIGHT)

    step = WEIGHT.abs().amax(1, keepdim=True) / 127
    assert ((product.dequantize() - WEIGHT).abs() <= 0.501 * step).all()


def test_float8_rounds_to_three_mantissa_bits() -> None:
    product = fp8.round_to_float8(WEIGHT)

    largest = WEIGHT.abs().amax(1, keepdim=True)
    assert ((product.dequantize() - WEIGHT).abs() <= 2.0**-4 * WEIGHT.abs() + largest * 2.0**-17).all()


def widened_before_the_product(weight: torch.Tensor) -> fp8.Float8Product:
    """Without the compiled kernel."""
    scales = weight.abs().amax(1, keepdim=True).float() / fp8.LARGEST
    return fp8.Float8Product((weight.float() / scales).to(torch.float8_e4m3fn), scales, weight.dtype)


@pytest.mark.parametrize("module", [int8.round_to_int8, fp8.round_to_float8, widened_before_the_product])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 4, 5, 40])
def test_any_number_of_rows_is_multiplied_with_the_same_weight(module: object, dtype: torch.dtype, count: int) -> None:
    assert callable(module)
    with float_products():
        product = module(WEIGHT.to(dtype))
    rows = torch.randn(count, 64, generator=torch.Generator().manual_seed(4)).to(dtype)

    expected = rows.float() @ product.dequantize().float().t()

    assert (product(rows).float() - expected).norm() / expected.norm() < (0.01 if dtype == torch.bfloat16 else 1e-5)


def test_a_weight_of_zeros_stays_zero() -> None:
    for product in (int8.round_to_int8(torch.zeros(16, 16)), fp8.round_to_float8(torch.zeros(16, 16))):
        assert torch.equal(product(torch.ones(2, 16)), torch.zeros(2, 16))
