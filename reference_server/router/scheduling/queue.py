"""The queue: entries in arrival order, and how many of them form the next batch.

First in, first out: the scan ends at the first entry that does not fit, and later entries are not tried.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reference_server.errors import ValidationError
from reference_server.images.chunks import uncut
from reference_server.messages import Batch, Request
from reference_server.router.scheduling.admission import Admission, Admitted, BatchBudget, TokenBudget
from reference_server.router.scheduling.request import ValidGenerateRequest


@dataclass(slots=True, eq=False)
class Entry:
    """One request from its arrival to its end. Times are read from the clock that drives the Scheduler.

    `remaining_prefill` prompt tokens have no K/V yet; the next forward computes `next_chunk` of them. `admitted` is
    its place in a batch with its blocks; None while it waits and after it has ended.
    """

    id: int
    request: ValidGenerateRequest
    queued_ns: int
    started_ns: int = 0
    admitted: Admitted | None = None
    abandoned: bool = False
    cached_input_tokens: int = 0
    remaining_prefill: int = 0
    next_chunk: int = 0

    def uncut(self, count: int) -> int:
        """The tokens of its next chunk in place of `count`, so that it ends within no image."""
        return uncut(self.request.input_len - self.remaining_prefill, count, self.request.uncut_spans)


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """Entries that were admitted together, in arrival order, and their batch as it goes on the wire."""

    batch: Batch
    entries: tuple[Entry, ...]


class Queue:
    """Waiting entries. It also numbers requests and batches: ids start at 0 and are never reused."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._waiting: OrderedDict[int, Entry] = OrderedDict()
        self._next_id = 0
        self._next_batch_id = 0
        self.num_discarded = 0
        """Cancelled entries removed so far."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> tuple[Entry, ...]:
        return tuple(self._waiting.values())

    def append(self, request: ValidGenerateRequest, now_ns: int) -> Entry:
        """Append a request. Raises `ValidationError` if it could never be admitted."""
        refusal = self.admission.refusal(request)
        if refusal is not None:
            raise ValidationError(refusal)
        entry = Entry(self._next_id, request, now_ns)
        self._next_id += 1
        self._waiting[entry.id] = entry
        return entry

    def discard(self, entry: Entry) -> None:
        """Remove an entry if it waits."""
        if self._waiting.pop(entry.id, None) is not None:
            self.num_discarded += 1

    def refuse(self, entry: Entry) -> bool:
        """Remove an entry that still waits; False if it does not wait. It does not count as discarded."""
        return self._waiting.pop(entry.id, None) is not None

    def next_batch(
        self, budget: TokenBudget, now_ns: int, *, min_size: int | None = None, max_size: int | None = None
    ) -> FormedBatch | None:
        """As many entries as the budget admits; None if none or fewer than `min_size` fit, with the queue unchanged."""
        if budget.is_zero:
            return None
        if max_size == 0 or len(self._waiting) < (min_size or 0):
            return None
        batch_budget = self.admission.open(budget)
        admitted = self._admit(batch_budget, max_size)
        if not admitted:
            return None
        if len(admitted) < (min_size or 0):
            self.put_back(admitted)
            return None
        return self._form(admitted, batch_budget, now_ns)

    def release(self, entry: Entry, *, is_sound: bool = True) -> None:
        """Free an admitted entry's blocks. Its prefix may be reused only if its whole prompt was computed."""
        assert entry.admitted is not None, f"entry {entry.id} holds no blocks"
        self.admission.release(entry.admitted, is_computed=is_sound and entry.remaining_prefill == 0)
        entry.admitted = None

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Free the blocks of admitted entries, whose prompts were not computed: they wait again, before all others."""
        for entry in reversed(entries):
            self.release(entry, is_sound=False)
            self._waiting[entry.id] = entry
            self._waiting.move_to_end(entry.id, last=False)

    def drain(self) -> list[Entry]:
        """Remove and return all waiting entries."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting

    def _admit(self, batch_budget: BatchBudget, max_size: int | None) -> list[Entry]:
        admitted: list[Entry] = []
        while self._waiting and not batch_budget.is_full and len(admitted) != max_size:
            entry = next(iter(self._waiting.values()))
            place = batch_budget.try_admit(entry.request)
            if place is None:
                break
            del self._waiting[entry.id]
            entry.admitted = place
            entry.remaining_prefill = entry.request.input_len - place.cache_len
            entry.next_chunk = entry.remaining_prefill if place.chunk_len is None else place.chunk_len
            admitted.append(entry)
        return admitted

    def _form(self, entries: list[Entry], batch_budget: BatchBudget, now_ns: int) -> FormedBatch:
        batch = Batch(
            id=self._next_batch_id,
            requests=tuple(_placed_request(entry) for entry in entries),
            max_tokens=batch_budget.max_tokens,
            max_blocks=batch_budget.max_blocks,
        )
        self._next_batch_id += 1
        for entry in entries:
            assert entry.admitted is not None, f"entry {entry.id} was not admitted"
            entry.started_ns = now_ns
            entry.cached_input_tokens = entry.admitted.cache_len
        return FormedBatch(batch, tuple(entries))


def _placed_request(entry: Entry) -> Request:
    """The entry's wire request with its id and K/V blocks."""
    place = entry.admitted
    assert place is not None, f"entry {entry.id} was not admitted"
    allocation = place.allocation
    return replace(
        entry.request.wire,
        id=entry.id,
        blocks=() if allocation is None else allocation.blocks,
        num_slots=0 if allocation is None else allocation.num_slots,
        cache_len=place.cache_len,
        chunk_len=place.chunk_len,
    )
