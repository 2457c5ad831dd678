"""The acceptance of drafts under a load: measured by step traces, or given in a cost file.

A text has parts that a draft source predicts well, and other parts. Therefore a token after an accepted token is
accepted much more often than the first token of a draft. Longer drafts need fewer steps for a well predicted part, so
the fraction of accepted first tokens is lower. The two probabilities below do not depend on the length of drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.errors import CostModelError
from tuner.simulator.fitting.traced_steps import TracedSteps

PROBABILITIES = ("coverage", "first", "next")


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """Drafts of one model under one load. All values are probabilities.

    coverage: a row has a draft if its last draft was not accepted to its end. first: the first token of that draft is
    accepted. next: a token after an accepted token is accepted, in the same draft or in the next one. is_adaptive: the
    values include only drafts that the server expected to save time; the other drafts are unknown.
    """

    coverage: float
    first: float
    next: float
    is_adaptive: bool = False

    def at(self, position: int) -> float:
        """The probability that a draft's tokens up to this position are all accepted, at the start of a stretch.

        >>> [round(DraftAcceptance(1.0, 0.4, 0.5).at(position), 3) for position in (1, 2, 3)]
        [0.4, 0.2, 0.1]
        """
        return float(self.first * self.next ** (position - 1))

    def to_json(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in PROBABILITIES}, "is_adaptive": self.is_adaptive}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "DraftAcceptance":
        """The inverse of `to_json`. Raises CostModelError."""
        try:
            coverage, first, following = (float(row[name]) for name in PROBABILITIES)
            is_adaptive = bool(row.get("is_adaptive", False))
        except (KeyError, TypeError, ValueError) as error:
            raise CostModelError(f"`acceptance` needs {', '.join(PROBABILITIES)} ({error!r})") from None
        values = (coverage, first, following)
        if not all(0 <= each <= 1 for each in values):
            raise CostModelError(f"`acceptance` has {values}, but {', '.join(PROBABILITIES)} are from 0 to 1")
        return cls(coverage, first, following, is_adaptive)


def fit_acceptance(launches: Sequence[TracedSteps]) -> DraftAcceptance | None:
    """The drafts of launches; None if no launch had any. Launches that verified every draft are preferred."""
    drafted = [steps for steps in launches if steps.drafts is not None and steps.drafted.any()]
    every = [steps for steps in drafted if _setting(steps, "speculate_adaptive") is False]
    chosen = every or drafted
    if not chosen:
        return None
    rows = drafts = whole = firsts = later = chances = 0.0
    for steps in chosen:
        assert steps.drafts is not None
        proposed, accepted = steps.drafts.sum(axis=0)
        # An adaptive server that leaves out a step's drafts does not report whether there were any.
        rows += float((steps.work[:, 4] if every else steps.work[steps.drafted > 0, 4]).sum())
        drafts += float(proposed[0])
        firsts += float(accepted[0])
        whole += float(accepted[-1])
        later += float(accepted[1:].sum())
        # Drafts at the end of an answer are shorter.
        longer = np.divide(proposed[1:], proposed[:-1], out=np.zeros(len(proposed) - 1), where=proposed[:-1] > 0)
        chances += float((accepted[:-1] * longer).sum())
    following = later / chances if chances else firsts / drafts
    # A draft after one that was accepted to its end continues the same part of the text.
    begun = max(drafts - whole, 1.0)
    first = min(1.0, max(0.0, (firsts - whole * following) / begun))
    coverage = min(1.0, max(0.0, (drafts - whole) / max(rows - whole, 1.0)))
    return DraftAcceptance(coverage, first, min(1.0, following), is_adaptive=not every)


def _setting(steps: TracedSteps, name: str) -> Any:
    settings = steps.facts.get("settings") or {}
    return (settings.get(name) or {}).get("value")
