"""Runs of steps with one decision, so that most steps cost one comparison; and the measured speed of plain steps.

Steps without a look are a rest. If one request is alone, its steps with drafts come in runs too, and the time of a run
is measured. Single looks are not measured: a single look finds cold caches and takes several times as long.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from reference_server.messages import NoDraft
from reference_server.model_server.speculation.acceptance import DraftHistory

RUN = 8
"""Steps of a run after runs that saved time."""
TRIAL = 4
"""Steps of any other run. The first step is not measured, because it finds cold caches."""
REFRESH = 32
"""Number of runs after which some plain steps are measured again."""
FEWEST_PLAIN = 6
"""Smallest number of steps of a rest to measure the speed of plain steps."""
COLD_STEPS = 2
"""First steps of a rest. They are not measured: after a draft they take longer than other plain steps."""
LEAST_GAIN = 0.05
"""Plain tokens that a step of a run has to save. It is above 0 because both speeds are measured in few steps."""
DECAY = 0.8
"""Weight of a rest's speed after the next rest."""
MOST_LOST = 1.0
"""Largest loss of a step of a run, in plain tokens: other work on the machine makes single steps long."""


@dataclass(slots=True)
class Rest:
    """Steps of the same rows without a look, and the reason.

    left: remaining steps. taken: steps that are not yet counted. num_steps: all steps so far. started_ns: start of the
    first measured step; 0 if the rest is not timed.
    """

    rows: tuple[object, ...] = ()
    reason: NoDraft = NoDraft.COST
    left: int = 0
    taken: int = 0
    num_steps: int = 0
    started_ns: int = 0


class Progress(NamedTuple):
    """The number of a request's ids at a time."""

    ns: float
    num_ids: int


@dataclass(slots=True)
class DraftRun:
    """Steps of one request, each with a draft if one is found.

    request: its sequence, to recognize it. token_ns: the time of a plain token. warm, newest: after the first and the
    newest step. accepted: accepted draft tokens of the step in progress.
    """

    request: object
    history: DraftHistory
    num_steps: int
    token_ns: float
    start: Progress
    warm: Progress = field(init=False)
    newest: Progress = field(init=False)
    taken: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.warm = self.newest = self.start

    def stepped(self, now_ns: float, num_ids: int) -> None:
        """Count the step in progress."""
        self.newest = Progress(now_ns, num_ids)
        self.taken += 1
        self.accepted = 0
        if self.taken == 1:
            self.warm = self.newest

    def interrupted(self, step_ns: float) -> None:
        """Count the step in progress, whose end was not measured, with the mean time of the steps before it.

        step_ns: its time if it is the first step.
        """
        if self.taken:
            step_ns = (self.newest.ns - self.start.ns) / self.taken
        self.stepped(self.newest.ns + step_ns, self.newest.num_ids + 1 + self.accepted)

    @property
    def value(self) -> float:
        """Plain tokens saved by each step; the first one counts only if it is alone."""
        since, steps = (self.warm, self.taken - 1) if self.taken > 1 else (self.start, 1)
        saved = self.newest.num_ids - since.num_ids - (self.newest.ns - since.ns) / self.token_ns
        return max(-MOST_LOST, saved / steps)

    @property
    def lost_ns(self) -> float:
        """Time that all steps lost, negative if they saved time."""
        lost = self.newest.ns - self.start.ns - (self.newest.num_ids - self.start.num_ids) * self.token_ns
        return min(lost, 2 * MOST_LOST * self.taken * self.token_ns)


class PlainSpeed:
    """The measured time of plain steps, divided by their time in the warm-up's cost. None before the first rest."""

    __slots__ = ("_expected_ns", "_spent_ns")

    def __init__(self) -> None:
        self._spent_ns = self._expected_ns = 0.0

    @property
    def ratio(self) -> float | None:
        return self._spent_ns / self._expected_ns if self._expected_ns else None

    def add(self, spent_ns: float, expected_ns: float) -> None:
        """Count a rest."""
        known = self.ratio
        if known is not None:
            spent_ns = min(spent_ns, 2 * known * expected_ns)
        self._spent_ns = DECAY * self._spent_ns + spent_ns
        self._expected_ns = DECAY * self._expected_ns + expected_ns
