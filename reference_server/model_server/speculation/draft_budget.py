"""Limits the time that drafts may lose to a share of the decoding time, independently of the estimates.

All times come from the cost model, so that all ranks make the same decision. The estimates of single requests select
the drafts to verify. The budget limits the loss of all drafts together, for example with many short requests without a
history.
"""

import math

LOSS_SHARE = 0.015
"""Share of the time of plain decoding that may be lost."""
FIRST_STEPS = 16.0
"""Plain steps whose time may be lost before drafts save time, once in the life of a server. This is enough for a few
looks of draft heads, some without a result."""
MOST_STEPS = 32.0
"""Plain steps whose time may be lost in a row after drafts that saved time. Outcomes vary by more than a step: with a
smaller reserve, drafts that save time on average would often have to wait."""


class DraftBudget:
    """Time in ns that may still be lost. It grows with every step and with the time that accepted tokens save."""

    __slots__ = ("_left_ns", "_most_ns")

    def __init__(self) -> None:
        self._most_ns = 0.0
        self._left_ns = 0.0

    def start(self, plain_ns: float) -> None:
        """Set the budget before the first step, which takes `plain_ns`; later calls have no effect."""
        if not self._most_ns:
            self._left_ns = FIRST_STEPS * plain_ns
            self._most_ns = MOST_STEPS * plain_ns

    def decoded(self, plain_ns: float, num_steps: int = 1) -> None:
        """Count steps, each of which takes `plain_ns` without drafts."""
        self.start(plain_ns)
        self._most_ns = MOST_STEPS * plain_ns
        self.add(num_steps * LOSS_SHARE * plain_ns)

    def add(self, saved_ns: float) -> None:
        """Count time that is saved, or lost if negative."""
        self._left_ns = min(self._left_ns + saved_ns, self._most_ns)

    def steps_until(self, cost_ns: float, plain_ns: float) -> int:
        """The steps of `plain_ns` after which work of `cost_ns` is allowed, if nothing is saved until then."""
        return max(0, math.ceil((cost_ns - self._left_ns) / (LOSS_SHARE * plain_ns)))

    def allows(self, cost_ns: float) -> bool:
        """Whether work of `cost_ns` may be lost."""
        return self._left_ns >= cost_ns
