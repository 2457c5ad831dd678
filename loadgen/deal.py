"""How one schedule is dealt among the workers of a run: pure, and the same wherever it is computed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from loadgen.datasets.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker's place among all: `index` of `count`. What is dealt goes round, one by one, from index 0 on."""

    index: int = 0
    count: int = 1

    def share_of(self, total: int) -> int:
        """How many of `total` things are this worker's.

        >>> [Seat(index, 3).share_of(8) for index in range(3)]
        [3, 3, 2]
        """
        return len(range(self.index, total, self.count))

    def times(self, times_ns: Sequence[int]) -> list[int]:
        """The arrivals that this worker starts."""
        return list(times_ns[self.index :: self.count])

    def prompts(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """What this worker sends: whole sessions, so that the turns of one stay together; most have one turn."""
        session = -1
        for prompt in prompts:
            session += prompt.turn == 0
            if session % self.count == self.index:
                yield prompt
