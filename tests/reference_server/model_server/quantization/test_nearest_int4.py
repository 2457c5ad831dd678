"""Weights rounded to four bits at load, with the best of a few scales in each group."""

import pytest
import torch

from reference_server.model_server.quantization.integers import float_products
from reference_server.model_server.quantization.nearest_int4 import MIDDLE, round_to_int4


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    with float_products():
        return round_to_int4(weight).dequantize()


@pytest.mark.parametrize("inputs", [128, 96, 44, 6])
def test_every_rounded_weight_is_near_the_weight_for_any_number_of_inputs(inputs: int) -> None:
    weight = torch.randn(40, inputs, generator=torch.Generator().manual_seed(1))

    rounded = dequantized(weight)

    assert rounded.shape == weight.shape
    # A step is at most the 7th part of the largest weight, and the largest one may be cut off by one step.
    assert ((rounded - weight).abs() <= weight.abs().amax() / 7).all()
    assert ((rounded - weight).norm() / weight.norm()).item() < 0.11


def test_codes_reach_as_far_as_the_largest_weight_of_either_sign() -> None:
    for sign in (1.0, -1.0):
        weight = (sign * torch.arange(-8.0, 8.0)).repeat(2, 4)

        assert torch.equal(dequantized(weight), weight)


def test_a_group_whose_ends_are_alike_has_no_code_that_is_only_for_one_of_them() -> None:
    weight = torch.tensor([-7.0, 7.0] * 32)[None]

    assert torch.allclose(dequantized(weight), weight)


def test_the_scale_has_the_least_squared_error() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    groups = weight.view(64, -1, 64)
    scales = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -MIDDLE
    plain = ((groups / scales).round().clamp(-8, 7) * scales).view_as(weight)

    assert (dequantized(weight) - weight).square().sum() < 0.97 * (plain - weight).square().sum()


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(32, 128)
    weight[0, 64:] = 1.0

    assert torch.equal(dequantized(weight), weight)


def test_a_weight_larger_than_a_chunk_is_rounded_row_by_row_the_same() -> None:
    weight = torch.randn(3, 1 << 20, generator=torch.Generator().manual_seed(3))

    assert torch.equal(dequantized(weight)[2:], dequantized(weight[2:]))
