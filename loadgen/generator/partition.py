"""How one schedule is divided among the workers of a run. Pure: every process computes the same division."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loadgen.workloads.prompts.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Partition:
    """The part of worker `index` of `count`. Items are assigned round-robin, from index 0 on."""

    index: int = 0
    count: int = 1

    def share_of(self, total: int) -> int:
        """How many of `total` items this worker gets.

        >>> [Partition(index, 3).share_of(8) for index in range(3)]
        [3, 3, 2]
        """
        return len(range(self.index, total, self.count))

    def times(self, times_ns: Iterable[int]) -> Iterator[int]:
        """The arrivals of this worker."""
        return itertools.islice(times_ns, self.index, None, self.count)

    def prompts(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """The prompts of this worker: whole sessions, so that their turns stay together. Most have one turn."""
        session = -1
        for prompt in prompts:
            session += prompt.turn == 0
            if session % self.count == self.index:
                yield prompt
