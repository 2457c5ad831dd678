"""Integer products of the compiled kernel in the model: which weights have one, and several weights in one product."""

import pytest
import torch
from torch import nn

from reference_server.model_server.quantization.int4 import GroupedIntegers
from reference_server.model_server.quantization.int8 import ScaledIntegers
from reference_server.model_server.quantization.integers import (
    IntegerProduct,
    can_compile,
    float_products,
    instructions,
    stack,
)
from reference_server.model_server.quantization.linear import QuantizedLinear, stacked

CPU = torch.device("cpu")
DTYPE = next((dtype for dtype in (torch.bfloat16, torch.float32) if can_compile(dtype, CPU)), torch.float32)
pytestmark = pytest.mark.skipif(not can_compile(DTYPE, CPU), reason="this processor has no integer product")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def grouped(outputs: int = 64, inputs: int = 128, groups: int = 4, bits: int = 4) -> GroupedIntegers:
    return GroupedIntegers(
        torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8),
        torch.rand(outputs, groups).half() + 0.1,
        torch.randint(0, 1 << bits, (outputs, groups)).float(),
        torch.arange(inputs) * groups // inputs,
        bits,
    )


def product_of(weight: GroupedIntegers) -> IntegerProduct:
    product = weight.product(DTYPE, CPU)
    assert isinstance(product, IntegerProduct)
    return product


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_a_weight_in_groups_keeps_its_values(bits: int, groups: int) -> None:
    weight = grouped(groups=groups, bits=bits)

    product = product_of(weight)

    assert product.kernel == f"int{bits}-{instructions()}"
    assert torch.equal(product.dequantize(), weight.dequantize(DTYPE))


def test_scales_of_any_size_keep_eleven_bits() -> None:
    weight = grouped()
    for factor in (1e-12, 1e12):
        scaled = GroupedIntegers(weight.codes, weight.scales.float() * factor, weight.zeros, weight.group_of, 4)

        found = product_of(scaled).weight.dequantize()

        assert torch.allclose(found, scaled.dequantize(torch.float32), rtol=2**-11, atol=0)


@pytest.mark.parametrize(("bits", "groups"), [(2, 4), (4, 64)])
def test_bits_and_groups_without_a_kernel_have_another_product(bits: int, groups: int) -> None:
    assert not isinstance(grouped(groups=groups, bits=bits).product(DTYPE, CPU), IntegerProduct)


def test_float_products_are_chosen_only_inside_the_block() -> None:
    weight = ScaledIntegers(torch.randint(-127, 128, (32, 64), dtype=torch.int8), torch.rand(32))

    with float_products():
        inside = weight.product(DTYPE, CPU)

    assert not isinstance(inside, IntegerProduct)
    assert isinstance(weight.product(DTYPE, CPU), IntegerProduct)


def test_permuted_inputs_are_multiplied_in_their_stored_order() -> None:
    weight = grouped()
    order = torch.randperm(128)
    permuted = GroupedIntegers(weight.codes, weight.scales, weight.zeros, weight.group_of[order], 4)
    rows = torch.randn(5, 128).to(DTYPE)

    product = product_of(permuted)

    expected = rows.double() @ permuted.dequantize(torch.float32).double().t()
    assert torch.equal(product.dequantize(), permuted.dequantize(DTYPE))
    assert ((product(rows) - expected).norm() / expected.norm()).item() < 0.01


def test_products_of_one_input_become_one_product() -> None:
    products = [product_of(grouped(outputs)) for outputs in (64, 32, 32)]
    rows = torch.randn(5, 128).to(DTYPE)

    whole = stack(products)

    assert whole is not None
    assert torch.equal(whole(rows), torch.cat([product(rows) for product in products], 1))


@pytest.mark.parametrize("other", [grouped(48), grouped(groups=2), grouped(bits=8)])
def test_other_layouts_are_not_stacked(other: GroupedIntegers) -> None:
    assert stack([product_of(other), product_of(grouped())]) is None


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("outputs", [(64, 32), (40, 32)])
def test_stacked_linears_share_the_memory_of_one_product(outputs: tuple[int, int], keep: bool) -> None:
    linears = []
    for size in outputs:
        linear = QuantizedLinear(nn.Linear(128, size).to(DTYPE), (size, 128), sums=False)
        linear.load(product_of(grouped(size)), DTYPE, CPU)
        linears.append(linear)
    rows = torch.randn(3, 128).to(DTYPE)
    before, nbytes = [linear.rows(rows) for linear in linears], [linear.nbytes for linear in linears]

    found = stacked(linears, keep)(rows)

    assert torch.equal(found, torch.cat(before, 1))
    assert [linear.nbytes for linear in linears] == nbytes
    assert all(torch.equal(linear.rows(rows), each) for linear, each in zip(linears, before, strict=True))
    memory = {linear.product.weight.codes.untyped_storage().data_ptr() for linear in linears}  # type: ignore[union-attr]
    assert len(memory) == (1 if outputs[0] % 32 == 0 and not keep else 2)
