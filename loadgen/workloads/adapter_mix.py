"""LoRA adapters of a load: the adapter of each request, by shares or by a Zipf law over names."""

import itertools
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.workloads.prompts.prompt import Prompt

EXAMPLE = "support:0.3"


@dataclass(frozen=True, slots=True)
class AdapterMix:
    """The names and their shares, whose sum is at most 1; the other requests use the base model."""

    shares: tuple[tuple[str, float], ...]
    seed: int = 0

    def of(self, prompt: Prompt) -> str | None:
        """The adapter of a prompt, the same for all turns of a session; None for the base model."""
        drawn = random.Random(f"adapter:{self.seed}:{prompt.session_id or prompt.prompt_id}").random()
        ends = list(itertools.accumulate(share for _, share in self.shares))
        place = bisect_right(ends, drawn)
        return self.shares[place][0] if place < len(ends) else None


def parse_share(text: str) -> tuple[str, float]:
    """The name and the share of `NAME:SHARE`. Raises ValueError.

    >>> parse_share("support:0.3"), parse_share("org/chat:25%")
    (('support', 0.3), ('org/chat', 0.25))
    """
    name, _, share = text.rpartition(":")
    try:
        value = float(share[:-1]) / 100 if share.endswith("%") else float(share)
    except ValueError:
        value = 0.0
    if not name.strip() or not 0 < value <= 1:
        raise ValueError(f"{text!r} is not NAME:SHARE; give a name and a share above 0, up to 1, as in {EXAMPLE}")
    return name.strip(), value


def parse_names(text: str) -> tuple[str, ...]:
    """The different names of a list. Raises ValueError.

    >>> parse_names("a, b,c")
    ('a', 'b', 'c')
    """
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{text!r} must be different names with commas between them")
    return names


def zipf_shares(names: Sequence[str], exponent: float) -> tuple[tuple[str, float], ...]:
    """Shares in proportion to 1 / rank**exponent; the sum is 1.

    >>> [(name, round(share, 3)) for name, share in zipf_shares(["a", "b", "c"], 1.0)]
    [('a', 0.545), ('b', 0.273), ('c', 0.182)]
    """
    weights = [rank**-exponent for rank in range(1, len(names) + 1)]
    return tuple((name, weight / sum(weights)) for name, weight in zip(names, weights, strict=True))
