"""The protocol of a proposer: it names the next configuration to launch, or declines. The sampler is used otherwise."""

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
    """The proposer has no further proposal. `then`, or the sampler, continues with all trials so far, unless `is_done`.

    `is_done`: no further gain is expected, so the search ends.
    """

    reason: str
    is_done: bool = False
    then: "Proposer | None" = None


class Proposer(Protocol):
    def propose(self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]) -> Proposal | Decline:
        """The next launch, from the results so far and the settings that other workers are measuring."""

    def best_first(self, results: Sequence[TrialResult]) -> list[Mapping[str, Any]] | None:
        """The measured settings, best first; None to order by measured values."""
