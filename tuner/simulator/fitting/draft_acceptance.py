"""How often drafts are accepted under a load: measured by step traces, or given in a cost file."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.errors import CostModelError
from tuner.simulator.fitting.step_trace import TracedSteps


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """Drafts of one model under one load.

    coverage: probability that a decoding row has a draft. by_position: probability that a draft's tokens up to this
    position are all accepted; it never rises. is_adaptive: measured only on drafts that the server expected to pay, so
    that drafts which it left out are unknown.
    """

    coverage: float
    by_position: tuple[float, ...]
    is_adaptive: bool = False

    def at(self, position: int) -> float:
        """The probability at a position from 1 on; after the last known one it falls by the same factor.

        >>> [DraftAcceptance(1.0, (0.8, 0.4)).at(position) for position in (1, 2, 3)]
        [0.8, 0.4, 0.2]
        """
        known = self.by_position
        if position <= len(known):
            return known[position - 1]
        before = known[-2] if len(known) > 1 else 1.0
        factor = known[-1] / before if before > 0 else 0.0
        return float(known[-1] * factor ** (position - len(known)))

    def to_json(self) -> dict[str, Any]:
        return {"coverage": self.coverage, "by_position": list(self.by_position), "is_adaptive": self.is_adaptive}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "DraftAcceptance":
        """The inverse of `to_json`. Raises CostModelError."""
        try:
            found = cls(
                float(row["coverage"]),
                tuple(float(each) for each in row["by_position"]),
                bool(row.get("is_adaptive", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CostModelError(f"`acceptance` needs `coverage` and `by_position` ({error!r})") from None
        values = (1.0, *found.by_position)
        is_falling = all(later <= earlier for earlier, later in itertools.pairwise(values))
        if not found.by_position or not is_falling or not all(0 <= each <= 1 for each in (found.coverage, *values)):
            raise CostModelError(
                "`acceptance` must have a `coverage` from 0 to 1 and, in `by_position`, probabilities that never rise"
            )
        return found


def fit_acceptance(launches: Sequence[TracedSteps]) -> DraftAcceptance | None:
    """The drafts of launches; None if no launch had any. Launches that verified every draft are preferred."""
    drafted = [steps for steps in launches if steps.drafts is not None and steps.drafted.any()]
    every = [steps for steps in drafted if _setting(steps, "speculate_adaptive") is False]
    chosen = every or drafted
    if not chosen:
        return None
    positions = max(steps.drafts.shape[2] for steps in chosen if steps.drafts is not None)
    proposed, accepted = np.zeros(positions), np.zeros(positions)
    rows = 0.0
    for steps in chosen:
        assert steps.drafts is not None
        totals = steps.drafts.sum(axis=0)
        proposed[: totals.shape[1]] += totals[0]
        accepted[: totals.shape[1]] += totals[1]
        # An adaptive server that leaves out a step's drafts does not report whether there were any.
        with_rows = steps.work[:, 4] if every else steps.work[steps.drafted > 0, 4]
        rows += float(with_rows.sum())
    rates = [a / p for a, p in zip(accepted, proposed, strict=True) if p > 0]
    falling = np.minimum.accumulate(rates)
    coverage = min(1.0, float(proposed[0]) / rows) if rows else math.nan
    return DraftAcceptance(coverage, tuple(float(each) for each in falling), is_adaptive=not every)


def _setting(steps: TracedSteps, name: str) -> Any:
    settings = steps.facts.get("settings") or {}
    return (settings.get(name) or {}).get("value")
