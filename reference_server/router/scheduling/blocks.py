"""K/V blocks: block arithmetic, one request's allocation, and the free-list allocator.

The pool is blocks 1 … `total_tokens // block_size - 1`. Block 0 is reserved for the liveness probe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PrefixKey = tuple[int, ...]
"""The prompt tokens that a prefix cache may match."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` token slots.

    >>> blocks_for(32, 16), blocks_for(33, 16)
    (2, 3)
    """
    return -(-tokens // block_size)


def round_up(tokens: int, block_size: int) -> int:
    """`tokens` rounded up to whole blocks.

    >>> round_up(20, 16)
    32
    """
    return blocks_for(tokens, block_size) * block_size


def pool(total_tokens: int, block_size: int) -> list[int]:
    """Every block that requests may use."""
    return list(range(1, total_tokens // block_size))


@dataclass(frozen=True, slots=True)
class BlockAllocation:
    """The blocks of one request, in order of token position. Freed exactly once, by the allocator that made it.

    The first `prefix_len` tokens already have K/V; their blocks are shared. `num_slots` counts the token slots, shared
    ones included. With a sliding window there are fewer blocks than slots, used in turn.
    """

    id: int
    blocks: tuple[int, ...]
    num_slots: int
    prefix_len: int = 0


class BlockAllocator(Protocol):
    """Allocates and frees blocks."""

    @property
    def capacity(self) -> int:
        """Blocks of an empty pool."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks on the free list or in the prefix cache."""
        ...

    def blocks_needed(self, tokens: int) -> int:
        """Blocks for `tokens` slots if nothing is cached."""
        ...

    def allocate(self, tokens: int, key: Sequence[int] | None, adapter_id: str | None = None) -> BlockAllocation | None:
        """Blocks for `tokens` slots; None if too few are free. Without a `key` no prefix is reused or cached."""
        ...

    def free(self, allocation: BlockAllocation, *, is_computed: bool) -> None:
        """Free an allocation. With `is_computed`, its whole prompt prefilled, its prefix may be reused."""
        ...

    def forget_prefixes(self) -> None:
        """Free all cached blocks: their K/V is gone. Nothing may be allocated."""
        ...


class FreeListAllocator:
    """A stack of blocks without prefix reuse: the most recently freed are allocated first."""

    def __init__(self, total_tokens: int, block_size: int, window_size: int | None = None) -> None:
        self._free = pool(total_tokens, block_size)
        self._capacity = len(self._free)
        self._block_size = block_size
        self._window_size = window_size
        self._live: set[int] = set()
        self._next_id = 1

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The free list; blocks are taken from its end."""
        return tuple(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_needed(self, tokens: int) -> int:
        held = tokens if self._window_size is None else min(tokens, self._window_size)
        return blocks_for(held, self._block_size)

    def allocate(self, tokens: int, key: Sequence[int] | None, adapter_id: str | None = None) -> BlockAllocation | None:  # noqa: ARG002
        need = self.blocks_needed(tokens)
        if need > len(self._free):
            return None
        allocation = BlockAllocation(self._next_id, take_last(self._free, need), tokens)
        self._live.add(allocation.id)
        self._next_id += 1
        return allocation

    def free(self, allocation: BlockAllocation, *, is_computed: bool) -> None:  # noqa: ARG002
        assert allocation.id in self._live, f"allocation {allocation.id} is freed twice"
        self._live.remove(allocation.id)
        self._free.extend(allocation.blocks)

    def forget_prefixes(self) -> None:
        """Nothing is cached."""


def take_last(free: list[int], count: int) -> tuple[int, ...]:
    """Remove the last `count` blocks of a free list, keeping their order."""
    start = len(free) - count
    taken = tuple(free[start:])
    del free[start:]
    return taken
