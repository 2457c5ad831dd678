"""Clients that leave before the end of their answer: a share of all, after a number of tokens."""

import random
from dataclasses import dataclass

EXAMPLE = "0.2@16"


@dataclass(frozen=True, slots=True)
class Departure:
    """`share` of the clients close their connection once they have received `tokens` tokens."""

    share: float
    tokens: int
    seed: int = 0

    def of(self, prompt_id: str) -> int | None:
        """The tokens after which the client of a prompt leaves; None if it stays. Equal for equal seeds.

        >>> Departure(1.0, 16).of("p1")
        16
        """
        return self.tokens if random.Random(f"departure:{self.seed}:{prompt_id}").random() < self.share else None


def parse_departure(text: str, seed: int = 0) -> Departure:
    """The departures of a text such as `0.2@16` or `20%@16`. Raises ValueError.

    >>> parse_departure("20%@16")
    Departure(share=0.2, tokens=16, seed=0)
    """
    part, _, tokens = text.partition("@")
    try:
        share = float(part[:-1]) / 100 if part.endswith("%") else float(part)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1 or not (tokens.isascii() and tokens.isdigit() and int(tokens) > 0):
        raise ValueError(f"{text!r} is not SHARE@TOKENS; give a share above 0, up to 1, and a count, as in {EXAMPLE}")
    return Departure(share, int(tokens), seed)
