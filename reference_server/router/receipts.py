"""The router's own count of what a shard's next forward will process: one token per decoding row, and prompt chunks.

The shard plans chunks by the same rule (model-server.md section 4.4), so its receipt's `current_tokens` must agree.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol


class PromptState(Protocol):
    """How much of a prompt has no K/V yet, and how much of that the next forward computes."""

    remaining_prefill: int
    next_chunk: int


def count_forward(entries: Iterable[PromptState]) -> bool:
    """Account for one forward over these rows; returns whether any of them was still in its prompt."""
    prefilling = [entry for entry in entries if entry.remaining_prefill]
    for entry in prefilling:
        entry.remaining_prefill -= entry.next_chunk
    return bool(prefilling)


def plan_chunks(entries: Sequence[PromptState], budget: int) -> None:
    """Share out the next forward's `budget` of tokens: one to a row, the rest to unfinished prompts, last row first."""
    left = budget - (len(entries) - 1)
    for entry in reversed(entries):
        if entry.remaining_prefill:
            entry.next_chunk = max(1, min(entry.remaining_prefill, left))
            left -= entry.next_chunk


def current_tokens(entries: Iterable[PromptState]) -> int:
    """Tokens that the next forward over these rows processes."""
    return sum(entry.next_chunk if entry.remaining_prefill else 1 for entry in entries)
