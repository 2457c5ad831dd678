import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from reference_server.router.scheduling.blocks import BlockAllocation
from reference_server.router.scheduling.radix import RadixAllocator, RadixTrie
from reference_server.transport.codec import expand_slots


def slots(allocation: BlockAllocation, block_size: int) -> list[int]:
    return expand_slots(allocation.blocks, allocation.num_slots, block_size)


def test_scheduling_S18_whole_prompt_blocks_are_found_again():
    allocator = RadixAllocator(total_tokens=30, block_size=3)
    ids = [7, 8, 9, 10, 11, 12, 13]

    first = allocator.allocate(10, ids)
    allocator.free(first, is_computed=True)
    free_blocks = allocator.free_blocks
    second = allocator.allocate(10, ids)

    assert (first.blocks, slots(first, 3), first.prefix_len) == ((6, 7, 8, 9), list(range(18, 28)), 0)
    assert free_blocks == (1, 2, 3, 4, 5, 8, 9)
    assert (second.blocks, slots(second, 3), second.prefix_len) == ((6, 7, 8, 9), list(range(18, 28)), 6)


def test_scheduling_S19_a_prompt_shorter_than_a_block_is_never_cached():
    allocator = RadixAllocator(total_tokens=30, block_size=3)

    first = allocator.allocate(9, [5, 6])
    allocator.free(first, is_computed=True)
    second = allocator.allocate(9, [5, 6])

    assert (first.blocks, first.prefix_len) == ((7, 8, 9), 0)
    assert (second.blocks, second.prefix_len) == ((7, 8, 9), 0)


def test_scheduling_S22_the_trie_splits_finds_and_evicts():
    trie = RadixTrie(block_size=2)

    present = [
        trie.insert([1, 1, 2, 2, 3, 3], [10, 11, 12]),
        trie.insert([1, 1, 2, 2, 4, 4, 5, 5], [20, 21, 22, 23]),
        trie.insert([7, 7], [30]),
    ]
    found = [trie.find([1, 1, 2, 2, 4, 4, 6, 6])[1], trie.find([7, 7, 8])[1]]
    evicted = [trie.evict(1), trie.evict(2), trie.evict(9)]

    assert present == [0, 4, 0]
    assert found == [[10, 11, 22], [30]]
    assert evicted == [[12], [22, 23], [10, 11, 30]]


def test_scheduling_S23_the_least_recently_used_prefix_is_evicted():
    allocator = RadixAllocator(total_tokens=9, block_size=1)
    first = allocator.allocate(5, [1, 2, 3])
    second = allocator.allocate(3, [8, 9])
    allocator.free(first, is_computed=True)
    allocator.free(second, is_computed=True)
    free_blocks = allocator.free_blocks

    third = allocator.allocate(6, [4, 4, 4])

    assert (first.blocks, second.blocks) == ((4, 5, 6, 7, 8), (1, 2, 3))
    assert free_blocks == (7, 8, 3)
    assert third.blocks == (7, 8, 3, 4, 5, 6)
    assert allocator.trie.find([8, 9])[1] == [1, 2]
    assert allocator.trie.find([1, 2, 3])[1] == []


def test_a_leaf_that_is_too_long_is_cut_from_its_end():
    trie = RadixTrie(block_size=1)
    trie.insert([1, 2, 3, 4], [5, 6, 7, 8])

    assert trie.evict(3) == [6, 7, 8]
    assert trie.find([1, 2, 3, 4])[1] == [5]


def test_a_recently_found_prefix_is_evicted_last():
    trie = RadixTrie(block_size=1)
    trie.insert([1], [5])
    trie.insert([2], [6])
    trie.find([1])

    assert trie.evict(1) == [6]


def test_a_shared_prefix_is_not_evicted_while_a_request_uses_it():
    allocator = RadixAllocator(total_tokens=80, block_size=16)
    prompt = range(32)
    allocator.free(allocator.allocate(32, prompt), is_computed=True)

    second = allocator.allocate(40, prompt)
    third = allocator.allocate(32, range(100, 132))

    assert second.prefix_len == 32
    assert third is None
    assert allocator.trie.find(prompt)[1] == list(second.blocks[:2])


def test_a_prompt_that_was_not_computed_is_not_found():
    allocator = RadixAllocator(total_tokens=80, block_size=16)
    allocator.free(allocator.allocate(40, range(32)), is_computed=False)

    again = allocator.allocate(40, range(32))

    assert again.prefix_len == 0
    assert len(allocator.free_blocks) + len(again.blocks) == allocator.capacity


def test_blocks_that_another_request_cached_meanwhile_return_to_the_free_list():
    allocator = RadixAllocator(total_tokens=160, block_size=16)
    first = allocator.allocate(32, range(32))
    second = allocator.allocate(32, range(32))
    allocator.free(first, is_computed=True)

    allocator.free(second, is_computed=True)

    assert allocator.trie.num_blocks == 2
    assert set(second.blocks) <= set(allocator.free_blocks)


def test_adapters_do_not_share_prefixes():
    allocator = RadixAllocator(total_tokens=160, block_size=16)
    allocator.free(allocator.allocate(32, range(32), adapter_id="a"), is_computed=True)

    assert allocator.allocate(32, range(32), adapter_id="b").prefix_len == 0
    assert allocator.allocate(32, range(32)).prefix_len == 0
    assert allocator.allocate(32, range(32), adapter_id="a").prefix_len == 32


def test_hardening_R2_a_root_exists_while_an_adapter_has_cached_blocks():
    allocator = RadixAllocator(total_tokens=16 * 9, block_size=16)
    for name in ("a", "b", "c"):
        assert allocator.allocate(16 * 9, range(16), adapter_id=name) is None
    without_adapter = allocator.trie.adapters
    allocator.free(allocator.allocate(32, range(32), adapter_id="a"), is_computed=True)
    cached = allocator.trie.adapters
    allocator.trie.evict(8)

    assert (without_adapter, cached, allocator.trie.adapters) == (frozenset(), frozenset("a"), frozenset())


def test_hardening_R7_a_refused_allocation_evicts_nothing():
    allocator = RadixAllocator(total_tokens=16 * 40, block_size=16)
    for first, num_blocks in ((0, 20), (10**6, 10)):
        ids = range(first, first + 16 * num_blocks)
        allocator.free(allocator.allocate(len(ids), ids), is_computed=True)
    running = allocator.allocate(16 * 12, range(10**6, 10**6 + 160))

    refused = allocator.allocate(16 * 28, None)
    left = allocator.trie.num_blocks
    admitted = allocator.allocate(16 * 27, None)

    assert (running.prefix_len, refused, left) == (160, None, 30)
    assert (len(admitted.blocks), allocator.trie.num_blocks) == (27, 10)


def test_a_refused_allocation_does_not_protect_its_prefix():
    allocator = RadixAllocator(total_tokens=5, block_size=1)
    allocator.free(allocator.allocate(2, [1, 2]), is_computed=True)
    held = allocator.allocate(2, None)

    refused = allocator.allocate(4, [1, 2])
    allocator.free(held, is_computed=False)

    assert refused is None
    assert len(allocator.allocate(4, None).blocks) == 4


def test_an_allocation_is_freed_once():
    allocator = RadixAllocator(total_tokens=64, block_size=16)
    allocation = allocator.allocate(16, range(16))
    allocator.free(allocation, is_computed=True)

    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(allocation, is_computed=True)


class AllocatorMachine(RuleBasedStateMachine):
    """Requests come and go over few distinct prompts; every block has one owner or is a shared, pinned prefix."""

    allocations = Bundle("allocations")

    @initialize(block_size=st.sampled_from([1, 2, 3]))
    def start(self, block_size):
        self.block_size = block_size
        self.allocator = RadixAllocator(total_tokens=17 * block_size, block_size=block_size)
        self.live = {}
        self.computed = []  # prompts that may be found

    @rule(
        target=allocations,
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        new=st.integers(1, 6),
        has_key=st.booleans(),
        adapter=st.sampled_from([None, "a"]),
    )
    def allocate(self, ids, new, has_key, adapter):
        key = tuple(ids) if has_key else None
        allocation = self.allocator.allocate(len(ids) + new - 1, key, adapter)
        if allocation is None:
            return None
        prefix = tuple(ids[: allocation.prefix_len])
        assert not prefix or any(
            owner == adapter and prompt[: len(prefix)] == prefix for owner, prompt in self.computed
        )
        assert len(allocation.blocks) * self.block_size >= allocation.num_slots
        self.live[allocation.id] = allocation
        return allocation, key, adapter

    @rule(taken=consumes(allocations), is_computed=st.booleans())
    def free(self, taken, is_computed):
        if taken is None:
            return
        allocation, key, adapter = taken
        self.allocator.free(allocation, is_computed=is_computed)
        del self.live[allocation.id]
        if is_computed and key is not None:
            self.computed.append((adapter, key))

    @precondition(lambda self: not self.live)
    @rule()
    def lose_the_cache(self):
        self.allocator.forget_prefixes()
        self.computed.clear()

    @invariant()
    def blocks_are_conserved(self):
        free = self.allocator.free_blocks
        cached = [block for node in self.allocator.trie.nodes() for block in node.blocks]
        own = [
            block
            for allocation in self.live.values()
            for block in allocation.blocks[allocation.prefix_len // self.block_size :]
        ]
        assert sorted([*free, *cached, *own]) == list(range(1, 17))
        assert self.allocator.trie.num_blocks == len(cached)
        assert self.allocator.num_free == 16 - len(own)

    @invariant()
    def a_prefix_in_use_stays_cached(self):
        cached = {block for node in self.allocator.trie.nodes() for block in node.blocks}
        for allocation in self.live.values():
            assert cached.issuperset(allocation.blocks[: allocation.prefix_len // self.block_size])

    @invariant()
    def references_are_pins_and_children(self):
        pins = sum(node.references - len(node.children) for node in self.allocator.trie.nodes())
        assert all(node.references >= len(node.children) for node in self.allocator.trie.nodes())
        assert pins <= len(self.live)


class LongAllocatorMachine(AllocatorMachine):
    """The same, more often."""


# 40 examples of up to 50 steps in CI, some 1,600 in all; 400 in the long run.
AllocatorMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, derandomize=True)
LongAllocatorMachine.TestCase.settings = settings(AllocatorMachine.TestCase.settings, max_examples=400)
test_no_interleaving_loses_a_block = AllocatorMachine.TestCase
test_no_interleaving_loses_a_block_at_length = pytest.mark.slow(LongAllocatorMachine.TestCase)
