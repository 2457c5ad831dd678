"""The products of adapters: plain torch, the reference, and the compiled CPU kernel (cpu_kernels/adapters.cpp).

Those of a GPU are in triton_product.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.attention import triton_backend
from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.models.adapters import triton_product
from reference_server.model_server.models.adapters.linears import AdaptableLinear
from reference_server.model_server.models.adapters.site import AdapterProduct, SiteFactors
from reference_server.model_server.models.fused.packed_linear import in_panels
from reference_server.model_server.step_state import AdapterSegments

# The structures of kernels.h.
UPDATE = np.dtype([(name, "i8") for name in ("packed", "rank", "first_rank", "outputs", "first_output")])
FACTORS = np.dtype([(name, "i8") for name in ("packed", "ranks", "inputs", "parts")] + [("updates", UPDATE, (3,))])


def product_for(like: Tensor, linears: Iterable[AdaptableLinear]) -> AdapterProduct:
    """The fastest product for weights of this type and device."""
    if like.device.type == "cuda" and like.dtype in triton_product.DTYPES and triton_backend.launches():
        return triton_product.TritonProduct(like.device)
    compiled = build.kernels() if like.device.type == "cpu" and like.dtype == torch.bfloat16 else None
    is_even = all(linear.own_inputs % 2 == 0 for linear in linears)
    if compiled is not None and hasattr(compiled, "adapters") and is_even:
        return CompiledProduct(compiled)
    return TorchProduct()


class TorchProduct:
    """One group of tokens after the other, a product with A and one with B for each part."""

    name = "torch"

    def __init__(self) -> None:
        self._factors: dict[tuple[int, int], SiteFactors] = {}

    def stored(self, factors: SiteFactors) -> SiteFactors:
        return factors

    def put(self, site: int, slot: int, stored: SiteFactors | None) -> None:
        if stored is None:
            self._factors.pop((site, slot), None)
        else:
            self._factors[site, slot] = stored

    def add(self, site: int, segments: AdapterSegments, rows: Tensor, result: Tensor) -> None:
        starts = segments.rows.starts.tolist()
        for number, slot in enumerate(segments.rows.groups.tolist()):
            factors = self._factors.get((site, slot))
            if factors is None:
                continue
            index = segments.order[starts[number] : starts[number + 1]]
            shrunk = F.linear(rows.index_select(0, index), factors.a)
            for update in factors.updates:
                result[:, update.outputs].index_add_(0, index, F.linear(shrunk[:, update.ranks], update.b))


@dataclass(frozen=True, slots=True, eq=False)
class PanelFactors:
    """A record of the table, and the tensors whose addresses it contains."""

    record: Any
    tensors: tuple[Tensor, ...]


class CompiledProduct:
    """All groups in one operator. The table has the factors of all sites and slots; the compiled walk reads it too."""

    name = "compiled"

    def __init__(self, operators: Any) -> None:
        self._operator = operators.adapters.default
        self._table = np.zeros((0, 0), FACTORS)
        self._stored: dict[tuple[int, int], PanelFactors] = {}
        self._rows: list[Tensor] = []
        self.table = torch.empty(0, dtype=torch.uint8)
        """[sites, slots] FACTORS as bytes."""

    def stored(self, factors: SiteFactors) -> "PanelFactors":
        """Ranks are padded to even numbers."""
        record = np.zeros((), FACTORS)
        ranks, kept = [], []
        first_rank = 0
        for number, update in enumerate(factors.updates):
            odd = update.b.shape[1] % 2
            b = in_panels(F.pad(update.b, (0, odd)))
            ranks.append(F.pad(factors.a[update.ranks], (0, 0, 0, odd)))
            outputs, rank = update.b.shape
            record["updates"][number] = (b.data_ptr(), rank + odd, first_rank, outputs, update.first_output)
            first_rank += rank + odd
            kept.append(b)
        a = in_panels(torch.cat(ranks))
        record["packed"], record["ranks"], record["inputs"] = a.data_ptr(), first_rank, factors.a.shape[1]
        record["parts"] = len(factors.updates)
        return PanelFactors(record, (a, *kept))

    def put(self, site: int, slot: int, stored: "PanelFactors | None") -> None:
        self._grow(site + 1, slot + 1)
        if stored is None:
            self._table[site, slot] = np.zeros((), FACTORS)
            self._stored.pop((site, slot), None)
        else:
            self._table[site, slot] = stored.record
            self._stored[site, slot] = stored

    def add(self, site: int, segments: AdapterSegments, rows: Tensor, result: Tensor) -> None:
        self._operator(result, rows, self._rows[site], torch.from_numpy(segments.rows.packed))

    def _grow(self, sites: int, slots: int) -> None:
        shape = self._table.shape
        if sites <= shape[0] and slots <= shape[1]:
            return
        capacity = shape[1] if slots <= shape[1] else max(slots, 2 * shape[1])
        grown = np.zeros((max(sites, shape[0]), capacity), FACTORS)
        grown[: shape[0], : shape[1]] = self._table
        self._table = grown
        self.table = torch.from_numpy(grown.view(np.uint8))
        self._rows = list(self.table)
