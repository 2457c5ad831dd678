"""The plain and the compiled product of adapters equal dense products; the compiled one's table grows."""

from types import SimpleNamespace

import pytest
import torch

from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.models.adapters.products import FACTORS, CompiledProduct, TorchProduct
from tests.support.models.adapter_products import SHAPES, run

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(("tokens", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_plain_updates_equal_dense_products(dtype: torch.dtype, tokens: int, inputs: int) -> None:
    outcome = run(TorchProduct(), tokens, inputs, dtype, torch.device("cpu"))

    assert outcome.relative_error <= LIMITS[dtype]
    assert outcome.untouched


@pytest.mark.parametrize(("tokens", "inputs"), SHAPES)
def test_compiled_updates_equal_dense_products(tokens: int, inputs: int) -> None:
    operators = build.kernels()
    if operators is None or not hasattr(operators, "adapters"):
        pytest.skip("there is no compiled bfloat16 product")

    outcome = run(CompiledProduct(operators), tokens, inputs, torch.bfloat16, torch.device("cpu"))

    assert outcome.relative_error <= LIMITS[torch.bfloat16]
    assert outcome.untouched


def test_the_table_has_room_for_the_slots_in_use_at_all_sites() -> None:
    product = CompiledProduct(SimpleNamespace(adapters=SimpleNamespace(default=None)))

    for slot in range(1, 9):
        for site in range(48):
            product.put(site, slot, None)

    assert product.table.shape == (48, 16 * FACTORS.itemsize)
