"""The compiled product of e4m3 weights: every code, any rows, outputs and blocks of scales; parts and stacks."""

import pytest
import torch
from torch import Tensor

from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.quantization import packed_float8
from reference_server.model_server.quantization.fp8 import ScaledFloats, round_to_float8
from reference_server.model_server.quantization.packed_float8 import PackedFloat8Product

BF16, CPU = torch.bfloat16, torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not hasattr(build.kernels(), "float8_linear"), reason="this processor has no bfloat16 product or no byte lookup"
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def floats(outputs: int, inputs: int, *scales: int) -> ScaledFloats:
    """Random codes without NaN. scales: the shape of the scales."""
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    return ScaledFloats(codes.view(torch.float8_e4m3fn), torch.rand(scales) + 0.5)


def product_of(weight: ScaledFloats) -> PackedFloat8Product:
    product = weight.product(BF16, CPU)
    assert isinstance(product, PackedFloat8Product)
    return product


def test_every_code_is_widened_exactly() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn)[:, None].expand(256, 2).contiguous()
    product = product_of(ScaledFloats(values, torch.ones(1, 1)))

    found = product(torch.tensor([[1.0, 0.0]], dtype=BF16))[0]

    expected = values[:, 0].to(BF16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~expected.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 12, 13, 40, 300])
@pytest.mark.parametrize(
    ("outputs", "inputs", "scales"),
    [(96, 64, (96, 1)), (40, 62, (1, 1)), (100, 300, (1, 3)), (256, 256, (2, 2)), (1, 128, (1, 1))],
)
def test_rows_have_the_product_of_the_dequantized_weight_and_the_bias(
    outputs: int, inputs: int, scales: tuple[int, int], rows: int
) -> None:
    weight = floats(outputs, inputs, *scales)
    hidden, bias = torch.randn(rows, inputs).to(BF16), torch.randn(outputs).to(BF16)

    found = product_of(weight).with_bias(hidden, bias)

    expected = hidden.double() @ weight.dequantize(torch.float64).t() + bias.double()
    assert found.shape == (rows, outputs)
    # One rounding to bfloat16.
    assert (found.double() - expected).norm() <= 2.0**-8 * expected.norm()


def test_the_result_of_a_row_does_not_depend_on_the_other_rows() -> None:
    product, hidden = product_of(floats(64, 128, 64, 1)), torch.randn(30, 128).to(BF16)

    together = product(hidden)

    assert all(torch.equal(product(hidden[row : row + 1])[0], together[row]) for row in range(30))


def test_the_weight_can_be_read_back() -> None:
    weight = floats(100, 300, 1, 3)

    assert torch.equal(product_of(weight).dequantize(), weight.dequantize(BF16))


def test_products_are_stacked_and_parted_without_a_change() -> None:
    hidden = torch.randn(3, 64).to(BF16)
    products = [product_of(floats(outputs, 64, outputs, 1)) for outputs in (64, 32)]

    whole = packed_float8.stack(products)

    assert whole is not None
    assert torch.equal(whole(hidden), torch.cat([each(hidden) for each in products], 1))
    assert torch.equal(whole.part(64, 32)(hidden), products[1](hidden))


@pytest.mark.parametrize("other", [(33, 64, (33, 1)), (32, 128, (32, 1)), (32, 64, (1, 2))])
def test_products_of_other_layouts_are_not_stacked(other: tuple[int, int, tuple[int, int]]) -> None:
    outputs, inputs, scales = other
    products = [product_of(floats(32, 64, 32, 1)), product_of(floats(outputs, inputs, *scales))]

    assert packed_float8.stack(products) is None


@pytest.mark.parametrize(("inputs", "dtype"), [(63, BF16), (64, torch.float32), (64, torch.float16)])
def test_other_weights_have_another_product(inputs: int, dtype: torch.dtype) -> None:
    product = round_to_float8(torch.randn(32, inputs).to(dtype))

    assert product.kernel == "dequantize"


def test_an_input_that_does_not_fit_is_refused() -> None:
    hidden: Tensor = torch.zeros(1, 62, dtype=BF16)

    with pytest.raises(RuntimeError, match="does not fit"):
        product_of(floats(32, 64, 1, 1))(hidden)
