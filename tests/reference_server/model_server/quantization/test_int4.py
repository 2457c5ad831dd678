"""Integer weights in groups: packing is reversible, and products equal those of the dequantized weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.model_server.quantization.int4 import (
    DequantizedIntegers,
    GroupedIntegers,
    PackedInt4,
    pack,
    unpack,
)
from reference_server.model_server.quantization.integers import float_products

CPU = torch.device("cpu")


@given(bits=st.sampled_from([2, 4, 8]), dim=st.sampled_from([0, 1]), seed=st.integers(0, 1000))
@settings(max_examples=30)
def test_unpacking_reverses_packing(bits: int, dim: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (32, 64), generator=generator, dtype=torch.uint8)

    words = pack(codes, bits, dim)

    assert words.dtype == torch.int32
    assert words.numel() == codes.numel() * bits // 32
    assert torch.equal(unpack(words, bits, dim), codes)


def weight_of(bits: int = 4, group: int = 32, shuffled: bool = False, uneven: bool = False) -> GroupedIntegers:
    generator = torch.Generator().manual_seed(3)
    group_of = torch.arange(128) // group
    if shuffled:
        group_of = group_of[torch.randperm(128, generator=generator)]
    if uneven:
        group_of[0] = group_of[-1]
    groups = int(group_of.max()) + 1
    return GroupedIntegers(
        torch.randint(0, 1 << bits, (48, 128), generator=generator, dtype=torch.uint8),
        torch.rand(48, groups, generator=generator) + 0.1,
        torch.randint(0, 1 << bits, (48, groups), generator=generator).float(),
        group_of,
        bits,
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("variant", [{}, {"group": 24}, {"shuffled": True}, {"uneven": True}])
def test_a_product_equals_that_of_the_dequantized_weight(bits: int, variant: dict[str, int]) -> None:
    weight = weight_of(bits, **variant)
    rows = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))

    with float_products():
        product = weight.product(torch.float32, CPU)

    assert isinstance(product, DequantizedIntegers)
    dequantized = weight.dequantize(torch.float32)
    assert torch.allclose(product.dequantize(), dequantized, rtol=1e-6)
    assert torch.allclose(product(rows), rows @ dequantized.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", [{}, {"shuffled": True}, {"group": 128}])
def test_the_packed_product_equals_that_of_the_dequantized_weight_up_to_rounding(variant: dict[str, int]) -> None:
    weight = weight_of(**variant)
    rows = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()

    with float_products():
        product = weight.product(torch.bfloat16, CPU)

    assert isinstance(product, PackedInt4)
    dequantized = weight.dequantize(torch.float32)
    assert (product(rows).float() - rows.float() @ dequantized.t()).norm() / (
        rows.float() @ dequantized.t()
    ).norm() < 0.01
    assert (product.dequantize().float() - dequantized).norm() / dequantized.norm() < 0.01


def test_weights_that_the_packed_product_does_not_support_are_dequantized() -> None:
    for weight in (weight_of(bits=8), weight_of(group=16), weight_of(uneven=True)):
        with float_products():
            assert isinstance(weight.product(torch.bfloat16, CPU), DequantizedIntegers)
