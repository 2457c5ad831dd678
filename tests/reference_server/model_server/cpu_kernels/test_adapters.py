"""The compiled product of adapters equals the plain one, and a compiled walk with adapters equals the walk."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reference_server.model_server.adapter_rows import AdapterRows
from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.models.adapters.products import FACTORS, CompiledProduct, TorchProduct
from reference_server.model_server.models.adapters.site import SiteFactors, Update
from reference_server.model_server.step_state import AdapterSegments

INPUTS, OUTPUTS = 96, (64, 40, 40)


def factors(ranks: tuple[int, ...], seed: int) -> SiteFactors:
    generator = torch.Generator().manual_seed(seed)
    updates, first_rank, first_output = [], 0, 0
    for rank, outputs in zip(ranks, OUTPUTS, strict=True):
        if rank:
            b = (torch.randn(outputs, rank, generator=generator) * 0.3).bfloat16()
            updates.append(Update(first_rank, first_output, b))
        first_rank, first_output = first_rank + rank, first_output + outputs
    a = (torch.randn(sum(ranks), INPUTS, generator=generator) * INPUTS**-0.5).bfloat16()
    return SiteFactors(a, tuple(updates))


@pytest.mark.parametrize("tokens", [1, 5, 12, 13, 64])
def test_compiled_updates_equal_the_plain_ones(tokens: int) -> None:
    operators = build.kernels()
    if operators is None or not hasattr(operators, "adapters"):
        pytest.skip("there is no compiled bfloat16 product")
    plain, compiled = TorchProduct(), CompiledProduct(operators)
    # Odd ranks, a part that the adapter leaves as it is, and a slot without factors.
    for slot, each in (
        (1, factors((16, 16, 16), 1)),
        (2, factors((3, 0, 5), 2)),
        (3, None),
        (4, factors((1, 8, 2), 4)),
    ):
        for product in (plain, compiled):
            product.put(0, slot, each)
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, INPUTS, generator=generator).bfloat16()
    slots = np.random.default_rng(tokens).integers(0, 5, tokens)
    slots[0] = 2
    segments = AdapterSegments.on(torch.device("cpu"), AdapterRows.of(slots))
    assert segments is not None
    base = torch.randn(tokens, sum(OUTPUTS), generator=generator).bfloat16()
    expected, found = base.clone(), base.clone()

    plain.add(0, segments, rows, expected)
    compiled.add(0, segments, rows, found)

    assert not torch.equal(expected, base)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(found[slots == 0], base[slots == 0])
    assert torch.equal(found[slots == 3], base[slots == 3])


def test_the_table_has_room_for_the_slots_in_use_at_all_sites() -> None:
    product = CompiledProduct(SimpleNamespace(adapters=SimpleNamespace(default=None)))

    for slot in range(1, 9):
        for site in range(48):
            product.put(site, slot, None)

    assert product.table.shape == (48, 16 * FACTORS.itemsize)
