"""Token lengths as a load states them: a number, or a distribution that is drawn from with a seeded generator."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts.

    >>> lengths = Lengths.parse("uniform:64,256")
    >>> 64 <= lengths.draw(random.Random(0)) <= 256
    True
    """

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises ValueError naming what is wrong."""
        kind, colon, rest = text.partition(":")
        if not colon:
            kind, rest = "fixed", text
        if kind not in KINDS:
            raise ValueError(f"{text!r} is no length: give a number or one of {EXAMPLES}")
        wanted = KINDS[kind].parameters
        try:
            numbers = [float(number) for number in rest.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != len(wanted) or not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"{text!r} is no length: {kind} takes {','.join(wanted)}, as in {KINDS[kind].example}")
        lengths = cls(kind, *numbers)
        problem = lengths._problem()
        if problem:
            raise ValueError(f"{text!r} is no length: {problem}")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        drawn = KINDS[self.kind].draw(rng, self.first, self.second)
        return max(1, min(round(drawn), MAX_TOKENS))

    @property
    def longest(self) -> int | None:
        """The longest that is ever drawn; None where there is no bound."""
        bounds = {"fixed": int(self.first), "uniform": int(self.second)}
        return bounds.get(self.kind)

    def __str__(self) -> str:
        numbers = [self.first, self.second][: len(KINDS[self.kind].parameters)]
        rendered = ",".join(f"{number:g}" for number in numbers)
        return rendered if self.kind == "fixed" else f"{self.kind}:{rendered}"

    def _problem(self) -> str | None:
        if not 1 <= self.first <= MAX_TOKENS:
            return f"{self.first:g} is not in 1..{MAX_TOKENS}"
        if self.kind == "fixed" and self.first != int(self.first):
            return f"{self.first:g} is not a whole number"
        if self.kind == "uniform" and not self.first <= self.second <= MAX_TOKENS:
            return f"{self.second:g} is below {self.first:g}"
        if self.second < 0:
            return f"{self.second:g} is negative"
        return None


@dataclass(frozen=True, slots=True)
class LengthKind:
    parameters: tuple[str, ...]
    example: str
    draw: Callable[[random.Random, float, float], float]


def _normal(rng: random.Random, mean: float, deviation: float) -> float:
    """Truncated to 1 and above by drawing again."""
    for _ in range(1_000):
        drawn = rng.gauss(mean, deviation)
        if drawn >= 0.5:
            return drawn
    return mean


def _lognormal(rng: random.Random, median: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(median), sigma)


KINDS = {
    "fixed": LengthKind(("N",), "128", lambda _rng, value, _second: value),
    "uniform": LengthKind(("LOW", "HIGH"), "uniform:64,256", lambda rng, low, high: rng.randint(int(low), int(high))),
    "normal": LengthKind(("MEAN", "DEVIATION"), "normal:128,32", _normal),
    "lognormal": LengthKind(("MEDIAN", "SIGMA"), "lognormal:128,0.5", _lognormal),
}
EXAMPLES = ", ".join(kind.example for name, kind in KINDS.items() if name != "fixed")
