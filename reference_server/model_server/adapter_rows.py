"""The adapter of each token of a step, and the tokens grouped by adapter: host arrays, no model."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

BASE = 0
"""The slot of tokens without an adapter."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """Tokens of a step that use adapters.

    slots: [tokens] int64, the adapter's slot, `BASE` for none. order: [n] int64, indices of the tokens with an adapter,
    sorted by slot and index. starts: [groups + 1] int64, start of each group in `order`, and its end. groups:
    [groups] int64, the slot of each group. packed: number of groups, groups, starts, order, for the compiled kernel.

        slots    0 2 1 0 2
        order    2 | 1 4        starts  0 1 3        groups  1 2
    """

    slots: IntArray
    order: IntArray
    starts: IntArray
    groups: IntArray
    packed: IntArray

    @classmethod
    def of(cls, slots: IntArray) -> "AdapterRows | None":
        """The groups of these tokens; None if no token uses an adapter."""
        if not slots.any():
            return None
        order = np.argsort(slots, kind="stable")
        order = order[np.count_nonzero(slots == BASE) :]
        ordered = slots[order]
        first = np.flatnonzero(np.diff(ordered, prepend=BASE))
        starts, groups = np.append(first, len(order)), ordered[first]
        return cls(slots, order, starts, groups, np.concatenate(([len(groups)], groups, starts, order)))

    def select(self, index: IntArray) -> "AdapterRows | None":
        """The rows of the tokens `index`, in that order."""
        return self.of(self.slots[index])
