"""The cases of an adapter product: tokens of several adapters at one site, against dense products in float64."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference_server.model_server.adapter_rows import AdapterRows
from reference_server.model_server.models.adapters.site import AdapterProduct, SiteFactors, Update
from reference_server.model_server.step_state import AdapterSegments

OUTPUTS = (64, 40, 40)
# Odd ranks, ranks of several tiles, a part that an adapter leaves as it is, a slot without factors.
RANKS = {1: (16, 16, 16), 2: (3, 0, 5), 3: None, 4: (1, 20, 2)}
BASE, EMPTY = 0, 3
# Tokens and inputs: one token, several tiles of tokens, several shares of inputs.
SHAPES = ((1, 96), (5, 300), (13, 96), (130, 96), (40, 1100))


@dataclass(frozen=True, slots=True)
class ProductOutcome:
    """relative_error: the largest difference from float64, over the largest element. untouched: tokens of the base
    model, and of an adapter that does not change the site, are bit for bit as before.
    """

    relative_error: float
    untouched: bool


def run(product: AdapterProduct, tokens: int, inputs: int, dtype: torch.dtype, device: torch.device) -> ProductOutcome:
    """Two sites and all slots of `RANKS`, then the update at one of them."""
    factors = {slot: None if ranks is None else _factors(ranks, inputs, slot) for slot, ranks in RANKS.items()}
    for slot, each in factors.items():
        product.put(0, slot, None)
        product.put(1, slot, None if each is None else product.stored(_on(each, dtype, device)))
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, inputs, generator=generator).to(dtype)
    base = torch.randn(tokens, sum(OUTPUTS), generator=generator).to(dtype)
    slots = np.random.default_rng(tokens).integers(0, 5, tokens)
    slots[0] = 2
    segments = AdapterSegments.on(device, AdapterRows.of(slots))
    assert segments is not None
    result = base.to(device, copy=True)

    product.add(1, segments, rows.to(device), result)

    expected = base.double()
    for slot, each in factors.items():
        if each is not None:
            own = _on(each, dtype, torch.device("cpu"))
            shrunk = rows.double() @ own.a.double().T
            for update in own.updates:
                change = shrunk[:, update.ranks] @ update.b.double().T
                expected[slots == slot, update.outputs] += change[slots == slot]
    found = result.cpu()
    still = (slots == BASE) | (slots == EMPTY)
    return ProductOutcome(
        float((found.double() - expected).abs().max() / expected.abs().max()), torch.equal(found[still], base[still])
    )


def _factors(ranks: tuple[int, ...], inputs: int, seed: int) -> SiteFactors:
    generator = torch.Generator().manual_seed(seed)
    updates, first_rank, first_output = [], 0, 0
    for rank, outputs in zip(ranks, OUTPUTS, strict=True):
        if rank:
            updates.append(Update(first_rank, first_output, torch.randn(outputs, rank, generator=generator) * 0.3))
        first_rank, first_output = first_rank + rank, first_output + outputs
    return SiteFactors(torch.randn(sum(ranks), inputs, generator=generator) * inputs**-0.5, tuple(updates))


def _on(factors: SiteFactors, dtype: torch.dtype, device: torch.device) -> SiteFactors:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)

    updates = (Update(each.first_rank, each.first_output, moved(each.b)) for each in factors.updates)
    return SiteFactors(moved(factors.a), tuple(updates))
