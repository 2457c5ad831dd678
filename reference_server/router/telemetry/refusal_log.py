"""The log of refused requests: the first of a kind, then a count, so that one client cannot fill the log."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""A kind of refusal has at most one line in this time."""


@dataclass(slots=True)
class Refusals:
    """The refusals of one kind: when the last line was written, and the number since then."""

    logged_s: float
    count: int = 0


@dataclass(slots=True)
class RefusalLog:
    """Writes refusals as errors. Errors of the server itself (status 500 and above) have a line each."""

    now_s: Callable[[], float] = time.monotonic
    _kinds: dict[str, Refusals] = field(default_factory=dict)

    def note(self, kind: str, status: int, error: Exception) -> None:
        """kind: the type of the error in the response, one of a few."""
        now_s = self.now_s()
        if status >= 500 or kind not in self._kinds:
            logger.error("%s", error)
            self._kinds.setdefault(kind, Refusals(now_s))
            return
        known = self._kinds[kind]
        if now_s - known.logged_s < INTERVAL_S:
            known.count += 1
            return
        others = f" (and {known.count} more of kind {kind!r} in {now_s - known.logged_s:.0f} s)" if known.count else ""
        logger.error("%s%s", error, others)
        self._kinds[kind] = Refusals(now_s)
