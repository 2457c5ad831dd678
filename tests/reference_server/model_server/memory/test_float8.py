"""Rounding to the eight-bit types of a K/V cache, against a search among all their values."""

import pytest
import torch

from reference_server.model_server.memory import float8


@pytest.mark.parametrize(("name", "count"), [("fp8_e4m3fn", 127), ("fp8_e5m2", 124)])
def test_a_value_is_rounded_to_the_nearest_one(name: str, count: int) -> None:
    dtype = float8.FLOAT8_TYPES[name]
    magnitudes = torch.arange(count).to(torch.uint8).view(dtype).double()
    generator = torch.Generator().manual_seed(4)
    exponents = torch.randint(-20, 18, (20_000,), generator=generator)
    values = torch.randn(20_000, generator=generator) * torch.exp2(exponents)

    found = float8.rounded(values, dtype).double()

    errors = (values.double().abs()[:, None] - magnitudes).abs().min(1).values
    assert torch.equal((found - values.double()).abs(), errors)
    assert torch.equal(found.signbit(), values.signbit())


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3fn", 448.0), ("fp8_e5m2", 57344.0)])
def test_a_value_that_is_too_large_becomes_the_largest_and_nan_stays(name: str, largest: float) -> None:
    found = float8.rounded(torch.tensor([1e6, -torch.inf, torch.nan]), float8.FLOAT8_TYPES[name]).float()

    assert found[:2].tolist() == [largest, -largest]
    assert found[2].isnan()
