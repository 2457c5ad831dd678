"""Admission: whether a request may join the batch that is being formed, and what it costs.

Three policies: rows x longest prompt (padded models), free K/V blocks (v3), and tokens rounded up to blocks that the
shard will choose (v2). queue.py decides which request is tried and when to stop.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from reference_server.images.chunks import uncut
from reference_server.messages import Image
from reference_server.router.scheduling.blocks import BlockAllocation, BlockAllocator, round_up
from reference_server.router.scheduling.request import ValidGenerateRequest


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Limits of a batch: prompt tokens computed in one forward, and tokens reserved while it runs."""

    prefill_tokens: int
    total_tokens: int

    @property
    def is_zero(self) -> bool:
        return self.prefill_tokens == 0 or self.total_tokens == 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A place in the batch. `chunk_len` is set if the first prefill computes only so many tokens after `cache_len`."""

    allocation: BlockAllocation | None = None
    cache_len: int = 0
    chunk_len: int | None = None


class BatchBudget(Protocol):
    """Budget of one batch while it is formed: its cost so far, and whether a request still fits."""

    @property
    def is_full(self) -> bool:
        """Whether the last admission used up the budget."""
        ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def max_blocks(self) -> int: ...

    def try_admit(self, request: ValidGenerateRequest) -> Admitted | None:
        """Take a place for the request; None if it has to wait."""
        ...


class Admission(Protocol):
    """A policy: opens a budget for each batch, frees places, and refuses what can never be admitted."""

    def open(self, budget: TokenBudget) -> BatchBudget: ...

    def release(self, admitted: Admitted, *, is_computed: bool) -> None:
        """Free a place. With `is_computed` the whole prompt has K/V, so its prefix may be reused."""
        ...

    def forget_prefixes(self) -> None:
        """The shard has lost all K/V: no cached prefix may be reused. No place may be taken."""
        ...

    def add_adapter(self, adapter_id: str) -> None:
        """The shard has loaded an adapter. Its id is never used for another one."""
        ...

    @property
    def blocks(self) -> tuple[int, int] | None:
        """K/V blocks on the free list or in the prefix cache, and all blocks; None if the shard allocates them."""
        ...

    def refusal(self, request: ValidGenerateRequest) -> str | None:
        """The reason that an empty server could not admit this request; None if it could."""
        ...


class TokenAdmission:
    """Limits the tokens of a batch, which `open_budget` counts. The shard allocates K/V itself."""

    def __init__(self, limits: TokenBudget, block_size: int, open_budget: Callable[[TokenBudget], BatchBudget]) -> None:
        self._limits = limits
        self._block_size = block_size
        self._open_budget = open_budget

    def open(self, budget: TokenBudget) -> BatchBudget:
        return self._open_budget(replace(budget, prefill_tokens=round_up(budget.prefill_tokens, self._block_size)))

    def release(self, admitted: Admitted, *, is_computed: bool) -> None:
        """Nothing was allocated."""

    def forget_prefixes(self) -> None:
        """Nothing is cached."""

    def add_adapter(self, adapter_id: str) -> None:
        """Nothing is cached."""

    @property
    def blocks(self) -> None:
        """The router allocates no blocks."""

    def refusal(self, request: ValidGenerateRequest) -> str | None:
        return _token_refusal(self.open(self._limits), request, self._limits)


def padded_admission(limits: TokenBudget, *, block_size: int = 1, speculate: int = 0) -> TokenAdmission:
    """For models that pad every prompt to the longest: prefill costs rows x longest."""
    return TokenAdmission(limits, block_size, lambda budget: _PaddedBudget(budget, speculate))


class _PaddedBudget:
    is_full = False
    max_blocks = 0

    def __init__(self, budget: TokenBudget, speculate: int) -> None:
        self._budget = budget
        self._speculate = speculate
        self._rows = self._longest = self._decode = 0

    @property
    def max_tokens(self) -> int:
        return self._rows * self._longest + self._decode

    def try_admit(self, request: ValidGenerateRequest) -> Admitted | None:
        longest = max(self._longest, request.input_len)
        decode = self._decode + request.wire.stopping.max_new_tokens
        prefill = (self._rows + 1) * longest
        if prefill > self._budget.prefill_tokens or prefill + decode + self._speculate > self._budget.total_tokens:
            return None
        self._rows, self._longest, self._decode = self._rows + 1, longest, decode
        return Admitted()


def rounded_admission(
    limits: TokenBudget, *, block_size: int, window_size: int | None = None, speculate: int = 0
) -> TokenAdmission:
    """For paged models on schema v2, whose shard allocates K/V itself: tokens count in whole blocks."""
    return TokenAdmission(limits, block_size, lambda budget: _RoundedBudget(budget, block_size, window_size, speculate))


class _RoundedBudget:
    is_full = False
    max_blocks = 0

    def __init__(self, budget: TokenBudget, block_size: int, window_size: int | None, speculate: int) -> None:
        self._budget = budget
        self._block_size = block_size
        self._window_size = window_size
        self._speculate = speculate
        self._prefill = self._decode = 0

    @property
    def max_tokens(self) -> int:
        return self._prefill + self._decode

    def try_admit(self, request: ValidGenerateRequest) -> Admitted | None:
        new_tokens = request.wire.stopping.max_new_tokens
        if self._window_size is not None:
            new_tokens = min(max(0, self._window_size - request.input_len), new_tokens)
        prefill = self._prefill + round_up(request.input_len, self._block_size)
        decode = self._decode + round_up(new_tokens, self._block_size)
        if prefill > self._budget.prefill_tokens or prefill + decode + self._speculate > self._budget.total_tokens:
            return None
        self._prefill, self._decode = prefill, decode
        return Admitted()


class PagedAdmission:
    """For paged models on schema v3: reserves K/V blocks for the prompt and for all new tokens of the segment.

    The total budget is the allocator's blocks, not a number of tokens. `adapters` are those that the shard has loaded.
    """

    def __init__(
        self,
        limits: TokenBudget,
        allocator: BlockAllocator,
        *,
        block_size: int,
        speculate: int = 0,
        supports_chunking: bool = False,
        adapters: Collection[str] = (),
    ) -> None:
        self._prefill_tokens = round_up(limits.prefill_tokens, block_size)
        self.allocator = allocator
        self._block_size = block_size
        self._speculate = speculate
        self._supports_chunking = supports_chunking
        # Ids of unloaded adapters stay: they never select the base model's prefixes.
        self._adapters = set(adapters)

    def open(self, budget: TokenBudget) -> BatchBudget:
        return _PagedBudget(self, round_up(budget.prefill_tokens, self._block_size), self._supports_chunking)

    def allocate(self, request: ValidGenerateRequest) -> BlockAllocation | None:
        # Any other id selects the base model and shares its cached prefixes.
        adapter_id = request.wire.adapter_id if request.wire.adapter_id in self._adapters else None
        return self.allocator.allocate(self._slots(request), _prefix_key(request), adapter_id)

    def release(self, admitted: Admitted, *, is_computed: bool) -> None:
        if admitted.allocation is not None:
            self.allocator.free(admitted.allocation, is_computed=is_computed)

    def forget_prefixes(self) -> None:
        self.allocator.forget_prefixes()

    def add_adapter(self, adapter_id: str) -> None:
        self._adapters.add(adapter_id)

    @property
    def blocks(self) -> tuple[int, int]:
        return self.allocator.num_free, self.allocator.capacity

    def refusal(self, request: ValidGenerateRequest) -> str | None:
        need, capacity = self.allocator.blocks_needed(self._slots(request)), self.allocator.capacity
        if need > capacity:
            return (
                f"`inputs` tokens + `max_new_tokens` need {need} blocks of the key-value cache, which has {capacity}. "
                f"{_given(request)}"
            )
        most = self._prefill_tokens
        if not self._supports_chunking and request.input_len > most:
            return f"`inputs` must have at most {most} tokens (`max_batch_prefill_tokens`). {_given(request)}"
        return None

    def _slots(self, request: ValidGenerateRequest) -> int:
        # The last generated token is never fed back, so it needs no slot.
        return request.input_len + request.wire.stopping.max_new_tokens + self._speculate - 1


class _PagedBudget:
    def __init__(self, admission: PagedAdmission, prefill_budget: int, supports_chunking: bool) -> None:
        self._admission = admission
        self._prefill_budget = prefill_budget
        self._supports_chunking = supports_chunking
        self._prefill = 0
        self.max_blocks = 0
        self.is_full = False

    @property
    def max_tokens(self) -> int:
        return self._prefill

    def try_admit(self, request: ValidGenerateRequest) -> Admitted | None:
        left = self._prefill_budget - self._prefill
        if left == 0:
            return None  # before the allocator evicts blocks for it
        allocation = self._admission.allocate(request)
        if allocation is None:
            return None
        # At least one token is computed, even if the whole prompt is in the cache.
        input_len = request.input_len
        cache_len = min(allocation.prefix_len, input_len - 1)
        uncached = input_len - cache_len
        if uncached <= left:
            self._prefill += uncached
            admitted = Admitted(allocation, cache_len)
        elif self._supports_chunking:
            self.is_full = True
            admitted = Admitted(allocation, cache_len, chunk_len=uncut(cache_len, left, request.uncut_spans))
        else:
            self._admission.release(Admitted(allocation), is_computed=False)
            return None
        self.max_blocks = max(self.max_blocks, len(allocation.blocks))
        return admitted


def _prefix_key(request: ValidGenerateRequest) -> tuple[int, ...] | None:
    """The tokens that a cached prefix may match.

    None with prompt logprobs, which need every logit, and with images whose content the tokens do not show.
    """
    if request.wire.prefill_logprobs:
        return None
    if request.prefix_ids is None and any(isinstance(chunk, Image) for chunk in request.wire.chunks):
        return None
    return request.prefix_ids or request.input_ids


def _token_refusal(empty: BatchBudget, request: ValidGenerateRequest, limits: TokenBudget) -> str | None:
    if empty.try_admit(request) is not None:
        return None
    return (
        f"`inputs` tokens + `max_new_tokens` exceed what one batch may hold: {limits.prefill_tokens} prompt tokens "
        f"(`max_batch_prefill_tokens`) and {limits.total_tokens} in all (`max_batch_total_tokens`). {_given(request)}"
    )


def _given(request: ValidGenerateRequest) -> str:
    return f"Given: {request.input_len} `inputs` tokens and {request.wire.stopping.max_new_tokens} `max_new_tokens`"
