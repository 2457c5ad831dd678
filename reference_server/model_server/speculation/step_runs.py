"""Runs of steps that are decided together, so that most steps cost a comparison; and the measured speed of plain steps.

A step without drafts is a rest. With one request, drafts come in runs too, and the time of a run is measured: a lone
look finds cold caches and takes several times as long as one of many.
"""

from dataclasses import dataclass

from reference_server.messages import NoDraft

RUN = 8
"""Steps of a run after runs that saved time."""
TRIAL = 4
"""The same otherwise. The first one is not measured: it finds cold caches."""
REFRESH = 32
"""Runs after which some plain steps are measured again."""
FEWEST_PLAIN = 4
"""Steps of a rest from which the speed of plain steps is measured."""
DECAY = 0.8
"""Weight of a rest's speed once the next one is known."""
MOST_LOST = 1.0
"""Plain tokens that a step of a run may count as lost: other work on the machine makes single steps long."""


@dataclass(slots=True)
class Rest:
    """Steps of the same rows without a look, and the reason.

    left: steps to come. taken: steps not yet counted. num_steps: all steps so far. started_ns: 0 if not timed.
    """

    rows: tuple[object, ...] = ()
    reason: NoDraft = NoDraft.COST
    left: int = 0
    taken: int = 0
    num_steps: int = 0
    started_ns: int = 0


@dataclass(slots=True)
class DraftRun:
    """Steps of one request, each with a draft if one is found.

    request: its sequence, to recognize it. ids: its number of ids before the first step. warm_ns, warm_ids: time and
    ids before the second one.
    """

    request: object
    left: int
    num_steps: int
    started_ns: int
    ids: int
    warm_ns: int = 0
    warm_ids: int = 0

    def value(self, now_ns: int, num_ids: int, token_ns: float) -> float:
        """Plain tokens saved by each step but the first. token_ns: the time of a plain token."""
        steps = self.num_steps - 1
        saved = num_ids - self.warm_ids - (now_ns - self.warm_ns) / token_ns
        return max(-MOST_LOST, saved / steps)

    def lost_ns(self, now_ns: int, num_ids: int, token_ns: float) -> float:
        """Time that all steps lost, negative if they saved time."""
        lost = (now_ns - self.started_ns) - (num_ids - self.ids) * token_ns
        return min(lost, 2 * MOST_LOST * self.num_steps * token_ns)


class PlainSpeed:
    """The measured time of plain steps, as a ratio to that of the warm-up's cost. None before the first rest."""

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
