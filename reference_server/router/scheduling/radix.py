"""The prefix cache: a trie of prompt tokens whose nodes own K/V blocks, and the allocator that reuses them.

Behaves like TGI's `backends/v3/src/radix.rs`, with two differences: an allocation whose prompt was never computed is
not cached, and tokens match only under the same adapter. Children are looked up by their tokens, not by a hash.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from reference_server.router.scheduling.blocks import BlockAllocation, PrefixKey, blocks_for, pool, take_last


@dataclass(slots=True, eq=False)
class TrieNode:
    """A run of tokens, a whole number of blocks long, that follows its parent's tokens.

    `references` counts pins and children. A node with none is a leaf and may be evicted.
    """

    age: int
    key: PrefixKey
    blocks: list[int]
    parent: "TrieNode | None"
    last_access: int = 0
    references: int = 0
    children: dict[PrefixKey, "TrieNode"] = field(default_factory=dict)


class RadixTrie:
    """Maps prompt prefixes to the blocks that hold their K/V. Each adapter with cached blocks has its own root."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[str | None, TrieNode] = {}
        self._clock = 0
        self._next_age = 0
        self._num_nodes = 0
        self._num_blocks = 0
        # A heap, least recently used first. Items whose node has since been touched, pinned or removed are skipped.
        self._leaves: list[tuple[int, int, TrieNode]] = []

    def find(self, key: Sequence[int], adapter_id: str | None = None) -> tuple[TrieNode, list[int]]:
        """The deepest node that shares at least its first tokens with `key`, and the shared blocks."""
        self._clock += 1
        key = tuple(key)
        node, blocks = self._roots.get(adapter_id) or _make_root(), list[int]()
        while (child := self._child(node, key)) is not None:
            self._touch(child)
            shared = self._shared_len(child.key, key)
            blocks += child.blocks[: shared // self._block_size]
            key = key[shared:]
            node = child
            if shared < len(child.key):
                break
        return node, blocks

    def insert(self, key: Sequence[int], blocks: Sequence[int], adapter_id: str | None = None) -> int:
        """Cache whole blocks under `key`; returns how many of its tokens already had blocks. Those blocks stay."""
        assert len(key) == len(blocks) * self._block_size > 0, "only whole blocks are cached"
        self._clock += 1
        key, blocks, present = tuple(key), list(blocks), 0
        node = self._roots.setdefault(adapter_id, _make_root())
        while key:
            child = self._child(node, key)
            if child is None:
                self._add_leaf(node, key, blocks)
                break
            self._touch(child)
            shared = self._shared_len(child.key, key)
            present += shared
            key, blocks = key[shared:], blocks[shared // self._block_size :]
            node = child if shared == len(child.key) else self._split(child, shared)
        return present

    def pin(self, node: TrieNode) -> None:
        """Protect a node, and so its ancestors, from eviction. Pinning a root has no effect."""
        if node.parent is not None:
            node.references += 1

    def unpin(self, node: TrieNode) -> None:
        if node.parent is not None:
            assert node.references > 0, "unpinned more often than pinned"
            self._release(node)

    def evict(self, count: int) -> list[int]:
        """Remove up to `count` blocks, those of the least recently used leaves first."""
        evicted: list[int] = []
        while len(evicted) < count and (leaf := self._oldest_leaf()) is not None:
            missing = count - len(evicted)
            if len(leaf.blocks) <= missing:
                evicted += leaf.blocks
                self._remove(leaf)
            else:
                evicted += leaf.blocks[-missing:]
                del leaf.blocks[-missing:]
                leaf.key = leaf.key[: len(leaf.blocks) * self._block_size]
                self._offer(leaf)
        self._num_blocks -= len(evicted)
        return evicted

    @property
    def adapters(self) -> frozenset[str | None]:
        """Adapters with cached blocks; None is the base model."""
        return frozenset(self._roots)

    @property
    def num_blocks(self) -> int:
        """Blocks held by the cache."""
        return self._num_blocks

    def num_evictable(self, pinned: Iterable[TrieNode]) -> int:
        """Blocks that could be evicted: those outside the `pinned` nodes and their ancestors."""
        protected: set[TrieNode] = set()
        for pin in pinned:
            node = pin
            while node.parent is not None and node not in protected:
                protected.add(node)
                node = node.parent
        return self._num_blocks - sum(len(node.blocks) for node in protected)

    def nodes(self) -> list[TrieNode]:
        """Every node but the roots, parents first."""
        found = [child for root in self._roots.values() for child in root.children.values()]
        for node in found:
            found.extend(node.children.values())
        return found

    def _child(self, node: TrieNode, key: PrefixKey) -> TrieNode | None:
        return node.children.get(key[: self._block_size]) if len(key) >= self._block_size else None

    def _shared_len(self, left: PrefixKey, right: PrefixKey) -> int:
        """Length of the common prefix, in tokens of whole blocks; the first block is known to be equal."""
        length = min(len(left), len(right)) // self._block_size * self._block_size
        if left[:length] == right[:length]:
            return length
        differs = next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
        return differs // self._block_size * self._block_size

    def _touch(self, node: TrieNode) -> None:
        node.last_access = self._clock
        if node.references == 0:
            self._offer(node)

    def _add_leaf(self, parent: TrieNode, key: PrefixKey, blocks: list[int]) -> None:
        leaf = self._make_node(parent, key, blocks)
        parent.children[key[: self._block_size]] = leaf
        self._retain(parent)
        self._num_blocks += len(blocks)
        self._offer(leaf)

    def _split(self, node: TrieNode, shared: int) -> TrieNode:
        """Insert a new parent above `node` that takes its first `shared` tokens; pins and children stay with `node`."""
        # before   parent ── [ a b c d ] ── children
        # after    parent ── [ a b ] ── [ c d ] ── children
        assert node.parent is not None, "a root has no key to split"
        num_blocks = shared // self._block_size
        upper = self._make_node(node.parent, node.key[:shared], node.blocks[:num_blocks])
        node.parent.children[upper.key[: self._block_size]] = upper
        node.key, node.blocks, node.parent = node.key[shared:], node.blocks[num_blocks:], upper
        upper.children[node.key[: self._block_size]] = node
        upper.references = 1
        return upper

    def _make_node(self, parent: TrieNode, key: PrefixKey, blocks: list[int]) -> TrieNode:
        node = TrieNode(self._next_age, key, blocks, parent, last_access=self._clock)
        self._next_age += 1
        self._num_nodes += 1
        return node

    def _retain(self, node: TrieNode) -> None:
        if node.parent is not None:
            node.references += 1

    def _release(self, node: TrieNode) -> None:
        node.references -= 1
        if node.references == 0:
            assert not node.children, "a node without references has no children"
            self._offer(node)

    def _remove(self, leaf: TrieNode) -> None:
        parent = leaf.parent
        assert parent is not None, "a root is never evicted"
        del parent.children[leaf.key[: self._block_size]]
        leaf.blocks = []
        self._num_nodes -= 1
        if parent.parent is not None:
            self._release(parent)
        elif not parent.children:
            self._roots = {adapter: root for adapter, root in self._roots.items() if root is not parent}

    def _offer(self, leaf: TrieNode) -> None:
        heapq.heappush(self._leaves, (leaf.last_access, leaf.age, leaf))
        if len(self._leaves) > 64 + 4 * self._num_nodes:
            current = {item[1]: item for item in self._leaves if _is_current(item)}
            self._leaves = sorted(current.values(), key=lambda item: item[:2])

    def _oldest_leaf(self) -> TrieNode | None:
        while self._leaves:
            item = heapq.heappop(self._leaves)
            if _is_current(item):
                return item[2]
        return None


def _make_root() -> TrieNode:
    return TrieNode(age=-1, key=(), blocks=[], parent=None)


def _is_current(item: tuple[int, int, TrieNode]) -> bool:
    last_access, _, node = item
    return node.references == 0 and bool(node.blocks) and node.last_access == last_access


@dataclass(frozen=True, slots=True)
class _Held:
    """An allocation's pinned node, and the tokens that `free` caches."""

    node: TrieNode
    key: PrefixKey | None
    adapter_id: str | None


class RadixAllocator:
    """Allocates from a free list and reuses the cached prompts of finished requests."""

    def __init__(self, total_tokens: int, block_size: int) -> None:
        self._free = pool(total_tokens, block_size)
        self._capacity = len(self._free)
        self._block_size = block_size
        self._trie = RadixTrie(block_size)
        self._no_node = _make_root()  # pinned by requests without a key
        self._live: dict[int, _Held] = {}
        self._next_id = 1

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The free list; blocks are taken from its end. Cached blocks are not on it."""
        return tuple(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free) + self._trie.num_blocks

    @property
    def trie(self) -> RadixTrie:
        return self._trie

    def blocks_needed(self, tokens: int) -> int:
        return blocks_for(tokens, self._block_size)

    def allocate(self, tokens: int, key: Sequence[int] | None, adapter_id: str | None = None) -> BlockAllocation | None:
        node, hit = (self._no_node, list[int]()) if key is None else self._trie.find(key, adapter_id)
        self._trie.pin(node)
        prefix_len = len(hit) * self._block_size
        need = blocks_for(tokens - prefix_len, self._block_size)
        missing = need - len(self._free)
        if missing > 0:
            if missing > self._trie.num_evictable([node, *(held.node for held in self._live.values())]):
                self._trie.unpin(node)
                return None
            self._free += self._trie.evict(missing)
        allocation = BlockAllocation(self._next_id, (*hit, *take_last(self._free, need)), tokens, prefix_len)
        self._live[allocation.id] = _Held(node, None if key is None else tuple(key), adapter_id)
        self._next_id += 1
        return allocation

    def free(self, allocation: BlockAllocation, *, is_computed: bool) -> None:
        assert allocation.id in self._live, f"allocation {allocation.id} is freed twice"
        held = self._live.pop(allocation.id)
        self._trie.unpin(held.node)
        published = allocation.prefix_len // self._block_size
        if is_computed and held.key is not None:
            published = self._publish(held, allocation)
        self._free += allocation.blocks[published:]

    def forget_prefixes(self) -> None:
        assert not self._live, "allocated blocks may share a cached prefix"
        self._free += self._trie.evict(self._trie.num_blocks)

    def _publish(self, held: _Held, allocation: BlockAllocation) -> int:
        """Cache the prompt's whole blocks; returns how many of the allocation's blocks the cache now owns."""
        # blocks   | found in the cache | cached by another meanwhile | newly cached | partial and generated |
        #          0              prefix_len                       present         whole
        assert held.key is not None, "published without a key"
        whole = len(held.key) // self._block_size
        if whole and len(held.key) > allocation.prefix_len:
            key = held.key[: whole * self._block_size]
            present = self._trie.insert(key, allocation.blocks[:whole], held.adapter_id)
            self._free += allocation.blocks[allocation.prefix_len // self._block_size : present // self._block_size]
        return whole
