"""The share of failed requests among the last ones, in the order of their sends.

The last requests to end are another sample: a refusal ends at once, so it is seen before the answers of the requests
that were sent with it.
"""

from collections import deque

COUNTED = 50


class RecentErrors:
    """Counts the requests that were sent before every request in flight. Requests are numbered from 1, as sent."""

    def __init__(self) -> None:
        self._ended: dict[int, bool | None] = {}
        self._next = 1
        self._recent: deque[bool] = deque(maxlen=COUNTED)

    def add(self, number: int, is_error: bool | None) -> float:
        """Note the end of a request; None if it ended by the load generator itself, so that it does not count.

        Returns the highest share of errors among `COUNTED` requests in a row, of those that this end completes; else 0.

        >>> errors = RecentErrors()
        >>> [errors.add(number, True) for number in range(2, 51)][-1]
        0.0
        >>> errors.add(1, False)
        0.98
        """
        self._ended[number] = is_error
        highest = 0.0
        while self._next in self._ended:
            found = self._ended.pop(self._next)
            self._next += 1
            if found is not None:
                self._recent.append(found)
                if len(self._recent) == COUNTED:
                    highest = max(highest, sum(self._recent) / COUNTED)
        return highest
