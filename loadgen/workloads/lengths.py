"""Token lengths of a load: a number, or a distribution that is sampled with a seeded generator."""

import bisect
import csv
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

MAX_TOKENS = 10_000_000
MAX_ZIPF = 2**20
EMPIRICAL = "empirical"


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
    file: str = ""
    values: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse a length; reads the file of empirical lengths. Raises ValueError."""
        kind, colon, rest = text.partition(":")
        if not colon:
            kind, rest = "fixed", text
        if kind == EMPIRICAL:
            values = tuple(row[0] for row in _read_rows(Path(rest), 1))
            return cls(kind, min(values), max(values), rest, values)
        if kind not in KINDS:
            raise ValueError(f"{text!r} is not a length; give a number or one of {EXAMPLES}")
        wanted = KINDS[kind].parameters
        try:
            numbers = [float(number) for number in rest.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != len(wanted) or not all(math.isfinite(number) for number in numbers):
            raise ValueError(
                f"{text!r} is not a length: {kind} requires {','.join(wanted)}, as in {KINDS[kind].example}"
            )
        lengths = cls(kind, numbers[0], numbers[1] if len(numbers) > 1 else 0.0)
        problem = lengths._problem()
        if problem:
            raise ValueError(f"{text!r} is not a length: {problem}")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        if self.values:
            return rng.choice(self.values)
        drawn = KINDS[self.kind].draw(rng, self.first, self.second)
        return max(1, min(round(drawn), MAX_TOKENS))

    @property
    def longest(self) -> int | None:
        """The largest possible length; None if there is no bound."""
        bounds = {"fixed": int(self.first), "uniform": int(self.second), "zipf": int(self.first)}
        bounds[EMPIRICAL] = int(self.second)
        return bounds.get(self.kind)

    def __str__(self) -> str:
        if self.file:
            return f"{self.kind}:{self.file}"
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
        if self.kind == "zipf" and self.first > MAX_ZIPF:
            return f"{self.first:g} is above {MAX_ZIPF}"
        if self.second < 0:
            return f"{self.second:g} is negative"
        return None


class PairedLengths(Protocol):
    """Input and output lengths of one request, drawn together."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Input tokens and output tokens, each at least 1."""


@dataclass(frozen=True, slots=True)
class Independent:
    """Two independent distributions."""

    input_tokens: Lengths
    output_tokens: Lengths

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self.input_tokens.draw(rng), self.output_tokens.draw(rng)


@dataclass(frozen=True, slots=True)
class Joint:
    """Observed pairs; every draw is one of them."""

    pairs: Sequence[tuple[int, int]]

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return rng.choice(self.pairs)


def read_pairs(path: Path) -> list[tuple[int, int]]:
    """The rows of a CSV file of input and output tokens, with or without a heading. Raises ValueError."""
    return [(row[0], row[1]) for row in _read_rows(path, 2)]


def _read_rows(path: Path, columns: int) -> list[list[int]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a file of lengths: {getattr(error, 'strerror', None) or error}") from error
    if rows and not any(cell.strip().isdigit() for cell in rows[0]):
        rows = rows[1:]
    if not rows:
        raise ValueError(f"{path} is not a file of lengths: it has no rows")
    return [_counts(row, columns, f"{path}: row {number}") for number, row in enumerate(rows, start=1)]


def _counts(row: Sequence[str], columns: int, where: str) -> list[int]:
    cells = [cell.strip() for cell in row[:columns]]
    if len(cells) < columns or not all(cell.isascii() and cell.isdigit() for cell in cells):
        raise ValueError(f"{where} is {','.join(row)!r}, not {columns} whole number{'s' if columns > 1 else ''}")
    counts = [int(cell) for cell in cells]
    if not all(1 <= count <= MAX_TOKENS for count in counts):
        raise ValueError(f"{where}: {','.join(cells)} is not in 1..{MAX_TOKENS}")
    return counts


@dataclass(frozen=True, slots=True)
class LengthKind:
    parameters: tuple[str, ...]
    example: str
    draw: Callable[[random.Random, float, float], float]


def _normal(rng: random.Random, mean: float, deviation: float) -> float:
    """Draws again until the value rounds to at least 1."""
    for _ in range(1_000):
        drawn = rng.gauss(mean, deviation)
        if drawn >= 0.5:
            return drawn
    return mean


def _lognormal(rng: random.Random, median: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(median), sigma)


def _zipf(rng: random.Random, largest: float, exponent: float) -> float:
    """Length k has weight k^-exponent, for k from 1 to `largest`."""
    weights = _zipf_weights(int(largest), exponent)
    return bisect.bisect_left(weights, rng.random() * weights[-1]) + 1


@lru_cache(maxsize=8)
def _zipf_weights(largest: int, exponent: float) -> list[float]:
    return list(itertools.accumulate(k**-exponent for k in range(1, largest + 1)))


KINDS = {
    "fixed": LengthKind(("N",), "128", lambda _rng, value, _second: value),
    "uniform": LengthKind(("LOW", "HIGH"), "uniform:64,256", lambda rng, low, high: rng.randint(int(low), int(high))),
    "normal": LengthKind(("MEAN", "DEVIATION"), "normal:128,32", _normal),
    "lognormal": LengthKind(("MEDIAN", "SIGMA"), "lognormal:128,0.5", _lognormal),
    "zipf": LengthKind(("LARGEST", "EXPONENT"), "zipf:2048,1.2", _zipf),
}
EXAMPLES = ", ".join((*(kind.example for name, kind in KINDS.items() if name != "fixed"), f"{EMPIRICAL}:FILE"))
