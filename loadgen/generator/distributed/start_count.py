"""Finds the start of the N-th measured request among several workers. Pure; times are on the master's clock, in ns."""

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StartCount:
    """Counts the starts that workers report until `count` are reached.

    A start counts once every worker has reported its starts up to that moment.
    """

    count: int
    _num_passed: int = 0
    _starts: list[int] = field(default_factory=list)
    _until: dict[int, int] = field(default_factory=dict)

    def add(self, worker: int, starts_ns: Sequence[int], until_ns: int) -> None:
        """All starts of a worker since its last report, up to `until_ns`."""
        self._starts += starts_ns
        self._until[worker] = until_ns

    def end_ns(self, workers: Collection[int], from_ns: int) -> int | None:
        """The start of the last counted request from `from_ns` on; None while it is unknown.

        >>> count = StartCount(2)
        >>> count.add(0, [5, 20, 30], until_ns=40)
        >>> count.end_ns((0, 1), from_ns=10)
        >>> count.add(1, [25], until_ns=35)
        >>> count.end_ns((0, 1), from_ns=10)
        25
        """
        known_until = min((self._until.get(worker, 0) for worker in workers), default=0)
        self._starts.sort()
        begin, end = bisect.bisect_left(self._starts, from_ns), bisect.bisect_right(self._starts, known_until)
        place = begin + self.count - self._num_passed - 1
        if place < end:
            return self._starts[place]
        self._num_passed += max(0, end - begin)
        del self._starts[: max(begin, end)]
        return None
