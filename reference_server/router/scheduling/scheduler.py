"""Continuous batching: decides the next call to the model server, without IO and without a clock.

`Scheduler` owns the queue, the entries and the shard's `CachedBatch` of every batch that runs. Its driver takes
`next_call`, sends it, and reports the answer to `on_reply` or `on_error`. The router drives it over a `Shard`, the
tuner's simulator in virtual time. One call is open at a time; entries may be appended and cancelled meanwhile.
"""

import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from reference_server.messages import CachedBatch, Generation, StepResult
from reference_server.router.scheduling.admission import (
    TokenBudget,
)
from reference_server.router.scheduling.blocks import round_up
from reference_server.router.scheduling.calls import (
    NO_DELIVERIES,
    Call,
    Clear,
    ConcatReason,
    Decode,
    Deliveries,
    Filter,
    Idle,
    Prefill,
)
from reference_server.router.scheduling.chunking import count_forward, current_tokens, plan_chunks
from reference_server.router.scheduling.queue import Entry, FormedBatch, Queue
from reference_server.router.scheduling.request import ValidGenerateRequest
from reference_server.router.scheduling.scheduler_options import SchedulerOptions, make_admission


@dataclass(slots=True)
class _Running:
    """A batch that the shard holds, and its live entries in the shard's order."""

    cached: CachedBatch
    entries: dict[int, Entry]


class Scheduler:
    """The batching state machine. `queue` is public for reading; only the Scheduler changes it."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options
        self.queue = Queue(make_admission(options))
        self._prefilling: tuple[Entry, ...] = ()  # of the open Prefill call
        self._running: _Running | None = None
        self._joining: _Running | None = None  # prefilled separately, merged into the running batch by the next Decode
        self._cleanups: deque[Filter | Clear] = deque()
        self._is_decode_due = False
        self._has_joined = False  # the open Decode follows a Prefill that joined, so the next turn tries again
        self._in_prompt = False  # a row of the running batch has not computed its whole prompt
        self._waiting_steps = 0  # 1 + decode steps since the last prefill
        self._chunk_budget = round_up(options.max_batch_prefill_tokens, options.block_size)

    @property
    def queue_size(self) -> int:
        return len(self.queue)

    @property
    def running(self) -> CachedBatch | None:
        """The running batch, as the shard last reported it."""
        return None if self._running is None else self._running.cached

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Live entries that have left the queue."""
        return (*(entry for part in self._parts() for entry in part.entries.values()), *self._prefilling)

    def is_open(self, call: Prefill) -> bool:
        """Whether the requests of a Prefill still wait for its reply."""
        return bool(self._prefilling) and self._prefilling == call.entries

    def ids_of(self, call: Call) -> set[int]:
        """The live requests of an open Prefill or Decode."""
        ids = {entry.id for entry in self._prefilling} if isinstance(call, Prefill) else set[int]()
        if isinstance(call, Decode) or (isinstance(call, Prefill) and call.cached is not None):
            ids.update(*(part.entries for part in self._parts()))
        return ids

    @property
    def expected_current_tokens(self) -> int:
        """Tokens of the running batch's next forward by the router's count; `running.current_tokens` must equal it."""
        return current_tokens(self._running.entries.values()) if self._running else 0

    def append(self, request: ValidGenerateRequest, now_ns: int) -> Entry:
        """Queue a request. Raises `ValidationError` if an empty server could not admit it."""
        return self.queue.append(request, now_ns)

    def cancel(self, entry: Entry) -> None:
        """Cancel an entry: a waiting one ends at once, a running one at its batch's next reply."""
        entry.abandoned = True
        self.queue.discard(entry)

    def refuse(self, entry: Entry) -> bool:
        """End an entry that still waits; False if it does not wait."""
        return self.queue.refuse(entry)

    def next_call(self, now_ns: int) -> Call:
        """The next call to send."""
        if self._cleanups:
            return self._cleanups.popleft()
        if self._running is None:
            self._is_decode_due = False
            limits, max_size = self.options.limits, self.options.max_batch_size
            formed = self.queue.next_batch(limits, now_ns, max_size=max_size)
            return Idle() if formed is None else self._open(formed)
        self._has_joined = self._is_decode_due
        if not self._is_decode_due:
            self._is_decode_due = True
            if len(self.queue) and (joining := self._join(self._running, now_ns)) is not None:
                return joining
        self._is_decode_due = False
        return Decode(tuple(part.cached for part in self._parts()))

    def stride(self) -> int | None:
        """While a Decode is open: the decode steps, this one included, until another call is possible.

        Valid until an entry arrives, is cancelled or ends; None if only one of these can change the next call.
        """
        if self._in_prompt:
            return 1
        if not len(self.queue):
            return None
        if self._has_joined:
            return 1
        if self.options.chunks_prefills or self._waiting_steps >= self.options.max_waiting_tokens:
            return None  # the first waiting entry did not fit
        return self.options.max_waiting_tokens - self._waiting_steps

    def on_reply(self, call: Call, reply: StepResult | CachedBatch | None, *, num_steps: int = 1) -> Deliveries:
        """Process the answer to a call: a StepResult for Prefill and Decode, a CachedBatch for Filter.

        Up to `stride` decode steps may be answered as one, with their number in `num_steps`.
        """
        match call, reply:
            case Prefill(), StepResult():
                return self._on_prefill(call, reply)
            case Decode(), StepResult():
                return self._on_decode(reply, num_steps)
            case Filter(), CachedBatch():
                self._part(call.batch_id).cached = reply
            case Clear(), None:
                pass
            case _:
                raise AssertionError(f"{reply!r} does not answer {call!r}")
        return NO_DELIVERIES

    def on_error(self, call: Call) -> list[Entry]:
        """End the entries of a failed call, free their blocks and return them."""
        match call:
            case Prefill():
                failed = self._end(self._close(), is_sound=False)
                self._clear_after_error(call.batch.id)
                if call.cached is not None:
                    # The failure may have come before or after the merge, so neither batch is valid.
                    failed += self._end_running()
                    self._clear_after_error(call.cached.id)
            case Decode():
                failed = self._end_running()
                for cached in call.batches:
                    self._clear_after_error(cached.id)
            case Filter():
                failed = self._end(self._forget(self._part(call.batch_id)), is_sound=False)
                self._clear_after_error(call.batch_id)
            case _:
                failed = []
        return failed

    def add_adapter(self, adapter_id: str) -> None:
        """The shard has loaded an adapter: its requests get prefixes of their own."""
        self.queue.admission.add_adapter(adapter_id)

    def forget_cache(self) -> None:
        """The shard has lost all K/V: nothing cached is reused, and the requests of an open Prefill wait again.

        No batch may run.
        """
        assert not self._parts(), "the K/V of a running batch was lost"
        entries = self._close()
        self.queue.put_back(entries)
        for entry in entries:
            if entry.abandoned:
                self.queue.discard(entry)
        self.queue.admission.forget_prefixes()

    def lose_batches(self) -> list[Entry]:
        """End the entries of all batches on the shard, which cannot be reached, and return them."""
        return self._end_running()

    def fail_all(self) -> list[Entry]:
        """End every entry, waiting and running. The Scheduler is not driven any further."""
        self._cleanups.clear()
        return [*self._end_running(), *self._end(self._close(), is_sound=False), *self.queue.drain()]

    def _join(self, running: _Running, now_ns: int) -> Prefill | None:
        """A Prefill of entries that join the running batch in this turn; None if none may."""
        options, cached = self.options, running.cached
        total_tokens = max(0, options.max_batch_total_tokens - cached.max_tokens)
        if options.chunks_prefills:
            prefill_tokens = max(0, options.max_batch_prefill_tokens - cached.current_tokens)
            formed = self.queue.next_batch(TokenBudget(prefill_tokens, total_tokens), now_ns)
            return None if formed is None else self._open(formed, ConcatReason.CHUNKING, cached=cached)
        min_size = None
        if self._waiting_steps < options.max_waiting_tokens:
            min_size = min_join_size(cached.size, options.waiting_served_ratio)
        max_size = None if options.max_batch_size is None else max(0, options.max_batch_size - cached.size)
        budget = TokenBudget(options.max_batch_prefill_tokens, total_tokens)
        formed = self.queue.next_batch(budget, now_ns, min_size=min_size, max_size=max_size)
        reason = ConcatReason.WAIT_EXCEEDED if min_size is None else ConcatReason.BACKPRESSURE
        return None if formed is None else self._open(formed, reason)

    def _open(
        self, formed: FormedBatch, reason: ConcatReason | None = None, cached: CachedBatch | None = None
    ) -> Prefill:
        self._prefilling = formed.entries
        self._waiting_steps = 1
        return Prefill(formed.batch, formed.entries, cached, reason)

    def _close(self) -> tuple[Entry, ...]:
        entries, self._prefilling = self._prefilling, ()
        return entries

    def _on_prefill(self, call: Prefill, reply: StepResult) -> Deliveries:
        entries = {entry.id: entry for entry in self._close()}
        self._in_prompt = True
        if call.reason is None:
            deliveries, self._running = self._settle(entries, reply)
        elif call.cached is None:
            deliveries, self._joining = self._settle(entries, reply)
        else:
            assert self._running is not None, "the running batch that was joined is gone"
            deliveries, self._running = self._settle(self._running.entries | entries, reply)
        return deliveries

    def _on_decode(self, reply: StepResult, num_steps: int) -> Deliveries:
        parts = self._parts()
        entries = parts[0].entries
        for part in parts[1:]:
            entries |= part.entries
        self._joining = None
        self._waiting_steps += num_steps
        deliveries, self._running = self._settle(entries, reply)
        return deliveries

    def _settle(self, entries: dict[int, Entry], reply: StepResult) -> tuple[Deliveries, _Running | None]:
        """Assign a step's generations to their entries; returns them and the rest of the batch, filtered if rows ended.

        entries: live entries by id, in the shard's order; those that end are removed.
        """
        held = _held(entries, reply.batch)
        if self._in_prompt:
            was_in_prompt = count_forward(entries.values())
            self._in_prompt = was_in_prompt and any(entry.remaining_prefill for entry in entries.values())
        if self._in_prompt:
            plan_chunks(list(held.values()), self._chunk_budget, Entry.uncut)
        delivered: list[tuple[Entry, Generation]] = []
        finished: list[Entry] = []
        for generation in reply.generations:
            entry = entries[generation.request_id]
            if not entry.abandoned:
                delivered.append((entry, generation))
                if generation.generated_text is not None:
                    finished.append(entry)
        abandoned = [entry for entry in entries.values() if entry.abandoned]
        lost: list[Entry] = []
        if held is not entries:
            ended = {entry.id for entry in (*finished, *abandoned)}
            lost = [entry for entry in entries.values() if entry.id not in held and entry.id not in ended]
        if finished or abandoned or lost:
            self._end((*finished, *abandoned))
            self._end(lost, is_sound=False)
            for entry in (*finished, *abandoned, *lost):
                del entries[entry.id]
        return Deliveries(delivered, lost, len(abandoned)), self._keep(entries, reply.batch)

    def _keep(self, entries: dict[int, Entry], cached: CachedBatch | None) -> _Running | None:
        """The batch that goes on, once it has been filtered to the live entries; None if it has none."""
        if cached is None:
            return None
        if not entries:
            self._cleanups.append(Clear(cached.id))
            return None
        if cached.size != len(entries):
            keep = tuple(filter(entries.__contains__, cached.request_ids))
            self._cleanups.append(Filter(cached.id, keep))
        return _Running(cached, entries)

    def _parts(self) -> list[_Running]:
        if self._joining is None:
            return [] if self._running is None else [self._running]
        return [self._joining] if self._running is None else [self._running, self._joining]

    def _part(self, batch_id: int) -> _Running:
        return next(part for part in self._parts() if part.cached.id == batch_id)

    def _forget(self, part: _Running) -> list[Entry]:
        if part is self._running:
            self._running = None
        else:
            self._joining = None
        return list(part.entries.values())

    def _end_running(self) -> list[Entry]:
        return [entry for part in self._parts() for entry in self._end(self._forget(part), is_sound=False)]

    def _end(self, entries: Iterable[Entry], *, is_sound: bool = True) -> list[Entry]:
        """Free entries' blocks. K/V of a failed step is not sound and is never reused as a prefix."""
        ended = list(entries)
        for entry in ended:
            self.queue.release(entry, is_sound=is_sound)
        return ended

    def _clear_after_error(self, batch_id: int) -> None:
        self._cleanups.append(Clear(batch_id, after_error=True))


@lru_cache(maxsize=4096)
def min_join_size(running_size: int, waiting_served_ratio: float) -> int:
    """Fewest waiting entries that may interrupt a running batch: a product in single precision, rounded down.

    >>> min_join_size(50, 0.58), int(50 * 0.58)
    (29, 28)
    """
    return int(_single(_single(running_size) * _single(waiting_served_ratio)))


def _single(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _held(entries: dict[int, Entry], cached: CachedBatch | None) -> dict[int, Entry]:
    """The entries that the shard still holds."""
    if cached is None:
        return {}
    if cached.size == len(entries):
        return entries
    return {request_id: entries[request_id] for request_id in cached.request_ids}
