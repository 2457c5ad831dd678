"""Tokens of the next forward: one per decoding row, and the prompt chunks of rows that are still in their prompt.

The shard plans chunks by the same rule, so `current_tokens` here equals the one in its `CachedBatch`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar


class PromptState(Protocol):
    """Prompt tokens without K/V, and how many of them the next forward computes."""

    remaining_prefill: int
    next_chunk: int


State = TypeVar("State", bound=PromptState)


def count_forward(entries: Iterable[PromptState]) -> bool:
    """Subtract one forward over these rows; returns whether any of them was still in its prompt."""
    prefilling = [entry for entry in entries if entry.remaining_prefill]
    for entry in prefilling:
        entry.remaining_prefill -= entry.next_chunk
    return bool(prefilling)


def plan_chunks(entries: Sequence[State], budget: int, uncut: Callable[[State, int], int] | None = None) -> None:
    """Divide the next forward's `budget` of tokens: one per row, the rest to unfinished prompts, last row first.

    uncut: the tokens of a row's chunk in place of these; a chunk that has to be whole may exceed the budget.
    """
    left = budget - (len(entries) - 1)
    for entry in reversed(entries):
        if entry.remaining_prefill:
            chunk = max(1, min(entry.remaining_prefill, left))
            entry.next_chunk = chunk if uncut is None else uncut(entry, chunk)
            left -= entry.next_chunk


def current_tokens(entries: Iterable[PromptState]) -> int:
    """Tokens that the next forward over these rows processes."""
    return sum(entry.next_chunk if entry.remaining_prefill else 1 for entry in entries)
