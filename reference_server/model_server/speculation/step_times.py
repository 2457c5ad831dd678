"""Corrects the warm-up's cost of a step by the times of the steps that follow one another while serving.

The warm-up measures a step alone. A step of a served batch also takes its reply, the router and the next call, which
drafts do not lengthen; and other work on the machine slows both down. Medians are used, and old times are forgotten, so
that a busy minute does not decide for long.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from reference_server.model_server.speculation.step_cost import StepCost

KEPT = 31
"""Times of which the median is taken."""
FEWEST = 5
UPDATED_AFTER = 8
"""Plain steps until their median is taken again."""
FORGOTTEN_AFTER = 64
"""Plain steps after which the oldest time with drafts is forgotten; drafted steps after which a plain one is due."""
UNTRIED = 0.6
"""The share of the warm-up's cost of drafts that is assumed until a few real ones are known, so that some are tried."""
LEAST_FACTOR, MOST_FACTOR = 0.25, 4.0


class Correction(NamedTuple):
    """plain_ns: a step without drafts as it is served; None if unknown. factor: of the time that drafts add."""

    plain_ns: float | None = None
    factor: float = 1.0


UNCORRECTED = Correction()


@dataclass(slots=True)
class _Times:
    """Of batches of about one size. beyond_ns: of plain steps, less the warm-up's time. factors: of drafted ones."""

    beyond_ns: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    factors: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    beyond: float | None = None
    plain_steps: int = 0
    drafted_in_row: int = 0


class StepTimes:
    """The times of served steps, by the number of binary digits of their rows."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._by_size = [_Times() for _ in range(cost.most_rows.bit_length() + 1)]

    def add_plain(self, num_rows: int, step_ns: float) -> None:
        """Count a step without drafts, and without looking for any."""
        times = self._of(num_rows)
        times.beyond_ns.append(step_ns - self._cost.plain_ns(num_rows))
        times.plain_steps += 1
        times.drafted_in_row = 0
        if times.plain_steps % UPDATED_AFTER == 0 or len(times.beyond_ns) == FEWEST:
            times.beyond = median(times.beyond_ns)
        if times.plain_steps % FORGOTTEN_AFTER == 0 and times.factors:
            times.factors.popleft()

    def add_drafted(self, num_rows: int, expected_ns: float, step_ns: float) -> None:
        """Count a step with drafts, which by the warm-up's cost add `expected_ns`."""
        times = self._of(num_rows)
        times.drafted_in_row += 1
        plain_ns = self._plain_ns(times, num_rows)
        if plain_ns is not None and expected_ns > 0:
            times.factors.append((step_ns - plain_ns) / expected_ns)

    def plain_ns(self, num_rows: int) -> float | None:
        """A step without drafts as it is served; None if unknown."""
        return self._plain_ns(self._of(num_rows), num_rows)

    def correction(self, num_rows: int) -> Correction:
        """The median times of about so many rows."""
        times = self._of(num_rows)
        plain_ns = self._plain_ns(times, num_rows)
        if plain_ns is None:
            return UNCORRECTED
        if len(times.factors) < FEWEST:
            return Correction(plain_ns, UNTRIED)
        return Correction(plain_ns, min(max(median(times.factors), LEAST_FACTOR), MOST_FACTOR))

    def wants_plain(self, num_rows: int) -> bool:
        """Whether a step should have no drafts so that the time of plain ones stays known."""
        times = self._of(num_rows)
        return len(times.beyond_ns) < FEWEST or times.drafted_in_row >= FORGOTTEN_AFTER

    def _plain_ns(self, times: _Times, num_rows: int) -> float | None:
        if times.beyond is None:
            return None
        plain_ns = self._cost.plain_ns(num_rows)
        return max(plain_ns + times.beyond, plain_ns / 2)

    def _of(self, num_rows: int) -> _Times:
        return self._by_size[min(num_rows, self._cost.most_rows).bit_length()]
