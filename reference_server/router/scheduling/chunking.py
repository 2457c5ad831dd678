"""Tokens of the next forward: one per decoding row, and the prompt chunks of rows that are still in their prompt.

The shard plans chunks by the same rule, so `current_tokens` here equals the one in its `CachedBatch`.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol


class PromptState(Protocol):
    """Prompt tokens without K/V, and how many of them the next forward computes."""

    remaining_prefill: int
    next_chunk: int


def count_forward(entries: Iterable[PromptState]) -> bool:
    """Subtract one forward over these rows; returns whether any of them was still in its prompt."""
    prefilling = [entry for entry in entries if entry.remaining_prefill]
    for entry in prefilling:
        entry.remaining_prefill -= entry.next_chunk
    return bool(prefilling)


def plan_chunks(entries: Sequence[PromptState], budget: int) -> None:
    """Divide the next forward's `budget` of tokens: one per row, the rest to unfinished prompts, last row first."""
    left = budget - (len(entries) - 1)
    for entry in reversed(entries):
        if entry.remaining_prefill:
            entry.next_chunk = max(1, min(entry.remaining_prefill, left))
            left -= entry.next_chunk


def current_tokens(entries: Iterable[PromptState]) -> int:
    """Tokens that the next forward over these rows processes."""
    return sum(entry.next_chunk if entry.remaining_prefill else 1 for entry in entries)
