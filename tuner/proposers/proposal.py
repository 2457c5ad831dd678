"""The protocol of a proposer. It returns the next configuration to launch, or declines; then the sampler continues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuner.trial.outcome import TrialResult


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings to launch next; `attributes` are stored with the trial."""

    settings: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decline:
    """The proposer has no further proposal.

    is_done: the search ends, because no further gain is expected. successor: the proposer that continues with all
    trials so far; None for the sampler.
    """

    reason: str
    is_done: bool = False
    successor: "Proposer | None" = None


class Proposer(Protocol):
    def propose(self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]) -> Proposal | Decline:
        """The next launch. `running`: settings that other workers are measuring."""

    def best_first(self, results: Sequence[TrialResult]) -> list[Mapping[str, Any]] | None:
        """The measured settings, best first; None to order them by measured values."""
