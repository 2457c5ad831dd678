"""Think time of a user between an answer and the next request: a time or a distribution."""

import random
from dataclasses import dataclass

from loadgen.config.durations import parse_duration

EXAMPLES = "2s, uniform:1s,3s, exponential:2s"


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """A distribution of pauses. `first` and `second` are seconds: the pause, its bounds, or its mean."""

    kind: str
    first: float
    second: float
    seed: int = 0

    @property
    def is_none(self) -> bool:
        return self.kind == "fixed" and self.first == 0

    def after(self, prompt_id: str) -> float:
        """The pause in seconds after the answer to a prompt; equal for equal seeds.

        >>> ThinkTime("fixed", 2.0, 0.0).after("p1")
        2.0
        """
        if self.kind == "fixed":
            return self.first
        rng = random.Random(f"think:{self.seed}:{prompt_id}")
        return rng.uniform(self.first, self.second) if self.kind == "uniform" else rng.expovariate(1 / self.first)


def parse_think_time(text: str, seed: int = 0) -> ThinkTime:
    """A pause or a distribution of pauses. Raises ValueError.

    >>> parse_think_time("uniform:500ms,2s")
    ThinkTime(kind='uniform', first=0.5, second=2.0, seed=0)
    """
    kind, colon, rest = text.partition(":")
    kind, rest = (kind, rest) if colon else ("fixed", text)
    times = [parse_duration(part) for part in rest.split(",")]
    wanted = {"fixed": 1, "uniform": 2, "exponential": 1}.get(kind)
    if len(times) != wanted or not all(isinstance(time, float) for time in times):
        raise ValueError(f"{text!r} is not a think time; give one of {EXAMPLES}")
    first, second = float(str(times[0])), float(str(times[-1]))
    if second < first or (kind == "exponential" and first == 0):
        raise ValueError(f"{text!r} is not a think time: {second:g} is below {first:g}, or its mean is 0")
    return ThinkTime(kind, first, second if kind == "uniform" else 0.0, seed)
