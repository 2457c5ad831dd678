"""Chooses the steps with a look, a search for drafts. Looks become rarer while none finds a draft to verify."""

import math
from collections.abc import Sequence

from reference_server.model_server.speculation.acceptance import PAUSE_OF_FREE_LOOKS

LOOK_SHARE = 0.01
"""Largest share of the time of plain decoding that is spent on looks without a draft to verify."""
LONGEST_PAUSE = 1024


class LookTimes:
    """Counts the decode steps of all requests. Until the next look is due, a step costs one comparison.

    A look that finds no draft doubles the number of steps until the next look. In addition, each request has its own
    pauses (`DraftHistory`); during a pause, looks continue for the other requests of the batch.
    """

    __slots__ = ("_due_from", "_look_from", "_pause", "_step", "_undue")

    def __init__(self) -> None:
        self._step = 0
        self._pause = 0
        self._look_from = 0
        self._due_from = 0
        self._undue: Sequence[object] = ()

    def rest(self, rows: Sequence[object]) -> int:
        """The number of next steps that have no look, with these rows."""
        pause = self._look_from - self._step
        if pause < self._due_from - self._step and rows == self._undue:
            return self._due_from - self._step
        return max(0, pause)

    def stepped(self, num_steps: int = 1) -> None:
        """Count steps."""
        self._step += num_steps

    def none_due(self, rows: Sequence[object], num_steps: int) -> None:
        """All of these rows pause for this many steps, counted from the next one."""
        self._undue, self._due_from = rows, self._step + num_steps

    def wait(self, num_steps: int) -> None:
        """Make no look in this many steps, counted from the next one."""
        self._look_from = self._step + num_steps

    def looked(self, has_drafts: bool, longest: int) -> None:
        """Count a look in the next step. longest: most steps until the following look if this one found no draft."""
        self._pause = 0 if has_drafts else min(max(1, 2 * self._pause), longest)
        self._look_from = self._step + max(1, self._pause)

    def look_again(self) -> None:
        """Return to short pauses, because a look would have drafted a token correctly."""
        self._pause = 0


def longest_pause(look_ns: float, step_ns: float) -> int:
    """Steps between two looks that find no draft, so that looks take at most LOOK_SHARE of the time.

    >>> longest_pause(5e3, 1e6), longest_pause(300e3, 1e6)
    (8, 30)
    """
    return min(LONGEST_PAUSE, max(PAUSE_OF_FREE_LOOKS, math.ceil(look_ns / (LOOK_SHARE * step_ns))))
