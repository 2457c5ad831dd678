"""The time of a decode step by its rows, as measured in the warm-up: the cost of a draft's tokens."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """Times of a step in ns, with its share of the host's work.

    rows_ns: by number of rows, from 1 on, greedy and with few keys. key_ns: for each key that a row attends to.
    drafts_ns: for each step with drafts; draft_row_ns: for each token of the drafts. sampled_row_ns: for each row that
    is not greedy. proposal_ns: to find drafts, by the number of sequences, from 1 on.
    """

    rows_ns: tuple[float, ...]
    key_ns: float = 0.0
    drafts_ns: float = 0.0
    draft_row_ns: float = 0.0
    sampled_row_ns: float = 0.0
    proposal_ns: tuple[float, ...] = (0.0,)

    def plain_ns(self, num_rows: int) -> float:
        """The time of a step without drafts, by its number of rows only."""
        return self.rows_ns[min(num_rows, len(self.rows_ns)) - 1]

    def proposing_ns(self, num_sequences: int) -> float:
        """The time to find the drafts of this many sequences."""
        return self.proposal_ns[min(num_sequences, len(self.proposal_ns)) - 1] if num_sequences else 0.0

    def added_ns(self, num_rows: int, num_drafted: int, keys: int = 0, num_sampled: int = 0) -> float:
        """The additional time of a step that verifies drafts. keys, num_sampled: of the drafted rows."""
        rows_ns = self.plain_ns(num_rows + num_drafted) - self.plain_ns(num_rows)
        rest_ns = num_drafted * self.draft_row_ns + keys * self.key_ns + num_sampled * self.sampled_row_ns
        return rows_ns + self.drafts_ns + rest_ns


def by_rows(measured_ns: Mapping[int, float], most_rows: int) -> tuple[float, ...]:
    """Times for 1 to `most_rows` rows: linear between measured times and after the last, never decreasing.

    >>> by_rows({1: 10.0, 3: 12.0, 4: 11.0}, 6)
    (10.0, 11.0, 12.0, 12.0, 12.0, 12.0)
    >>> by_rows({1: 10.0, 2: 14.0}, 4)
    (10.0, 14.0, 18.0, 22.0)
    """
    sizes = sorted(measured_ns)
    times = [measured_ns[size] for size in sizes]
    for place in range(1, len(times)):
        times[place] = max(times[place], times[place - 1])
    if len(sizes) == 1:
        return tuple(times * most_rows)
    rows_ns = []
    for size in range(1, most_rows + 1):
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (times[right] - times[right - 1]) / (high - low)
        rows_ns.append(times[right - 1] + slope * (size - low))
    return tuple(rows_ns)
