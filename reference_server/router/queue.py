"""The waiting line: entries in arrival order, and how many of them become the next batch.

Strictly first in, first out: the first entry that does not fit ends the scan, and nothing behind it is tried.
"""

from collections import deque
from dataclasses import dataclass

from reference_server.errors import ValidationError
from reference_server.messages import Batch, Request
from reference_server.router.admission import Admission, Admitted, Budget, Tally
from reference_server.router.request import ValidGenerateRequest


@dataclass(slots=True, eq=False)
class Entry:
    """One generation from its arrival to its end. Times are of the clock that the Scheduler is driven by.

    `remaining_prefill` prompt tokens have no K/V yet, of which the next forward computes `next_chunk`. `admitted` is
    its place in a batch and the blocks that go with it; None while it waits and after it has ended.
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


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """Entries that were admitted together, in arrival order, and the batch that goes on the wire for them."""

    batch: Batch
    entries: tuple[Entry, ...]


class Queue:
    """Entries that wait, and the ids of requests and batches. Ids start at 0 and are never reused."""

    def __init__(self, admission: Admission, *, is_zero_budget_final: bool = True) -> None:
        """With `is_zero_budget_final` a budget of zero ends an attempt before dead entries are looked at (v3)."""
        self._admission = admission
        self._is_zero_budget_final = is_zero_budget_final
        self._waiting: deque[Entry] = deque()
        self._next_id = 0
        self._next_batch_id = 0
        self.num_discarded = 0
        """Entries found abandoned so far."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> tuple[Entry, ...]:
        return tuple(self._waiting)

    @property
    def next_batch_id(self) -> int:
        return self._next_batch_id

    def append(self, request: ValidGenerateRequest, now_ns: int) -> Entry:
        """Join the back of the line. A request that could never be admitted is a `ValidationError`."""
        refusal = self._admission.refusal(request)
        if refusal is not None:
            raise ValidationError(refusal)
        entry = Entry(self._next_id, request, now_ns)
        self._next_id += 1
        self._waiting.append(entry)
        return entry

    def next_batch(
        self, budget: Budget, now_ns: int, *, min_size: int | None = None, max_size: int | None = None
    ) -> FormedBatch | None:
        """As many entries as the budget admits; None, and nothing taken, if fewer than `min_size` or none fit."""
        if self._is_zero_budget_final and budget.is_zero:
            return None
        if max_size == 0 or len(self._waiting) < (min_size or 0):
            return None
        tally = self._admission.open(budget)
        admitted = self._admit(tally, max_size)
        if not admitted:
            return None
        if len(admitted) < (min_size or 0):
            self._put_back(admitted)
            return None
        return self._form(admitted, tally, now_ns)

    def release(self, entry: Entry, *, is_sound: bool = True) -> None:
        """Free what an admitted entry holds. Its prefix may be reused only if all of its prompt was computed."""
        assert entry.admitted is not None, f"entry {entry.id} holds nothing"
        self._admission.release(entry.admitted, is_computed=is_sound and entry.remaining_prefill == 0)
        entry.admitted = None

    def drain(self) -> list[Entry]:
        """Empty the line."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def _admit(self, tally: Tally, max_size: int | None) -> list[Entry]:
        admitted: list[Entry] = []
        while self._waiting and not tally.is_full and len(admitted) != max_size:
            entry = self._waiting[0]
            if entry.abandoned:
                self._waiting.popleft()
                self.num_discarded += 1
                continue
            place = tally.try_admit(entry.request)
            if place is None:
                break
            self._waiting.popleft()
            entry.admitted = place
            entry.remaining_prefill = entry.request.input_len - place.cache_len
            entry.next_chunk = entry.remaining_prefill if place.chunk_len is None else place.chunk_len
            admitted.append(entry)
        return admitted

    def _put_back(self, entries: list[Entry]) -> None:
        for entry in reversed(entries):
            self.release(entry)
            self._waiting.appendleft(entry)

    def _form(self, entries: list[Entry], tally: Tally, now_ns: int) -> FormedBatch:
        batch = Batch(
            id=self._next_batch_id,
            requests=tuple(_wire_request(entry) for entry in entries),
            max_tokens=tally.max_tokens,
            max_blocks=tally.max_blocks,
        )
        self._next_batch_id += 1
        for entry in entries:
            assert entry.admitted is not None, f"entry {entry.id} was not admitted"
            entry.started_ns = now_ns
            entry.cached_input_tokens = entry.admitted.cache_len
        return FormedBatch(batch, tuple(entries))


def _wire_request(entry: Entry) -> Request:
    request, place = entry.request, entry.admitted
    assert place is not None, f"entry {entry.id} was not admitted"
    allocation = place.allocation
    return Request(
        id=entry.id,
        chunks=request.chunks,
        truncate=request.truncate,
        parameters=request.parameters,
        stopping=request.stopping,
        prefill_logprobs=request.prefill_logprobs,
        top_n_tokens=request.top_n_tokens,
        blocks=() if allocation is None else allocation.blocks,
        num_slots=0 if allocation is None else allocation.num_slots,
        cache_len=place.cache_len,
        chunk_len=place.chunk_len,
        adapter_id=request.adapter_id,
        add_special_tokens=request.add_special_tokens,
    )
