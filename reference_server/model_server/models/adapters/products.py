"""The products of adapters in plain torch: the reference of the compiled and the Triton kernels."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.models.adapters.site import SiteFactors
from reference_server.model_server.step_state import AdapterSegments


class TorchProduct:
    """One group of tokens after the other, two products for each part."""

    name = "torch"

    def place(self, factors: SiteFactors) -> SiteFactors:
        return factors

    def add(self, placed: Sequence[Any | None], segments: AdapterSegments, rows: Tensor, result: Tensor) -> None:
        starts = segments.rows.starts.tolist()
        for number, slot in enumerate(segments.rows.groups.tolist()):
            factors = placed[slot] if slot < len(placed) else None
            if factors is None:
                continue
            index = segments.order[starts[number] : starts[number + 1]]
            shrunk = F.linear(rows.index_select(0, index), factors.a)
            for update in factors.updates:
                result[:, update.outputs].index_add_(0, index, F.linear(shrunk[:, update.ranks], update.b))
