import doctest

import pytest

from reference_server.router.scheduling import blocks
from reference_server.router.scheduling.blocks import BlockAllocation, FreeListAllocator
from reference_server.transport.codec import expand_slots


def slots(allocation: BlockAllocation, block_size: int) -> list[int]:
    return expand_slots(allocation.blocks, allocation.num_slots, block_size)


def test_scheduling_S16_the_most_recently_freed_blocks_are_allocated_first():
    allocator = FreeListAllocator(total_tokens=24, block_size=2)

    first = allocator.allocate(8, None)
    second = allocator.allocate(5, None)
    allocator.free(first, is_computed=True)
    third = allocator.allocate(3, None)

    assert (first.blocks, slots(first, 2)) == ((8, 9, 10, 11), list(range(16, 24)))
    assert (second.blocks, slots(second, 2)) == ((5, 6, 7), [10, 11, 12, 13, 14])
    assert (third.blocks, slots(third, 2)) == ((10, 11), [20, 21, 22])
    assert allocator.free_blocks == (1, 2, 3, 4, 8, 9)


def test_scheduling_S17_a_window_cycles_through_its_blocks():
    allocator = FreeListAllocator(total_tokens=160, block_size=16, window_size=64)

    allocation = allocator.allocate(150, None)

    window = list(range(96, 160))
    assert allocation.blocks == (6, 7, 8, 9)
    assert slots(allocation, 16) == [*window, *window, *range(96, 118)]


def test_block_0_is_never_allocated():
    allocator = FreeListAllocator(total_tokens=64, block_size=16)

    allocation = allocator.allocate(48, None)

    assert allocation.blocks == (1, 2, 3)
    assert allocator.allocate(1, None) is None


def test_an_allocation_that_does_not_fit_changes_nothing():
    allocator = FreeListAllocator(total_tokens=64, block_size=16)

    assert allocator.allocate(49, None) is None
    assert allocator.free_blocks == (1, 2, 3)


def test_an_allocation_is_freed_once():
    allocator = FreeListAllocator(total_tokens=64, block_size=16)
    allocation = allocator.allocate(16, None)
    allocator.free(allocation, is_computed=True)

    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(allocation, is_computed=True)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(blocks).failed == 0
