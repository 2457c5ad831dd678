"""One simulated server: the router's Scheduler, and a shard whose step times follow a step law.

This module does the work of the shard (rows, chunks, receipts). The Scheduler makes all batching decisions. Consecutive
decode steps without a possible decision between them are simulated as one stride. A step with drafts (drafting.py)
is an event of its own, after which each row has its accepted tokens and one more.
"""

import heapq
from collections.abc import Callable, Mapping

from reference_server.errors import ValidationError
from reference_server.messages import (
    CachedBatch,
    FinishReason,
    GeneratedText,
    Generation,
    StepResult,
    Tokens,
)
from reference_server.router.scheduling.blocks import round_up
from reference_server.router.scheduling.calls import Clear, Decode, Filter, Idle, Prefill
from reference_server.router.scheduling.chunking import count_forward, plan_chunks
from reference_server.router.scheduling.queue import Entry
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.scheduling.segments import segment_tokens
from reference_server.router.scheduling.step_work import StepWork
from tuner.errors import NotSimulatedError
from tuner.simulator.drafting import Drafting, DraftingRow, SpeculatingLaw
from tuner.simulator.replica_state import Counts, Flight, ShardRow, Stride, prompt_work
from tuner.simulator.simulated_request import request_of
from tuner.simulator.step_law import AdaptedLaw, RangedLaw, StepLaw

ADAPTERS_NOT_MEASURED = (
    "the load has LoRA adapters, whose cost in a step is not measured: calibrate a server with `--lora-adapters`"
)
NO_DRAFTS: Mapping[int, int] = {}
_TOKEN = Tokens((0,), (0.0,), ("",), (False,))
_ENDED = GeneratedText("", 1, FinishReason.LENGTH)


class Replica:
    """A server of TGI's architecture in virtual time.

    Call `submit` for each arrival, `begin` if the server is idle, and `end` at the time that `begin` returned. After an
    arrival during a stride, call `cut`, which shortens the stride to the step that is running at that time.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        law: StepLaw,
        *,
        with_strides: bool = True,
        with_gaps: bool = False,
        on_call: Callable[[Prefill | Decode, int], None] | None = None,
    ) -> None:
        is_speculating = isinstance(law, SpeculatingLaw)
        assert is_speculating or not options.speculate, "a server with drafts needs a law with drafts"
        self._drafting = Drafting(law) if isinstance(law, SpeculatingLaw) else None
        self.scheduler = Scheduler(options)
        self.counts = Counts()
        self.in_system = 0
        self._law = law
        self._strides = with_strides and law.kv_ns is not None
        self._block_size = options.block_size
        self._chunk_budget = round_up(options.max_batch_prefill_tokens, options.block_size)
        self._chunks = options.chunks_prefills
        self._needs_ids = options.use_prefix_caching
        self._on_call = on_call
        self._rows: dict[int, dict[int, ShardRow]] = {}
        self._flights: dict[int, Flight] = {}
        self._step = 0  # decode steps so far
        self._ended = 0  # requests that ended with the last step
        self._kv = 0  # tokens with K/V of rows that decode
        self._num_decoding = 0
        self._num_prefilling = 0
        self._ends: list[tuple[int, int]] = []  # (decode step, entry) of rows that decode
        self._max_tokens: dict[int, int] = {}
        self._running: Stride | None = None
        self._step_times: list[int] | None = [] if with_gaps else None
        self._waited_ns: dict[str, int] = {}
        self._max_batch_size = options.max_batch_size
        self._adapted_law = law if isinstance(law, AdaptedLaw) and law.has_adapters else None
        self._has_adapters = False
        self._ranges = law.ranges if isinstance(law, RangedLaw) else None

    @property
    def rows(self) -> int:
        """Sequences in the shard."""
        return self._num_decoding + self._num_prefilling

    def submit(self, flight: Flight, now_ns: int) -> bool:
        """Queue the next segment of a request; false if the options do not allow it.

        Raises NotSimulatedError for an adapter whose cost is unknown.
        """
        if flight.adapter is not None:
            if self._adapted_law is None:
                raise NotSimulatedError(ADAPTERS_NOT_MEASURED)
            self._has_adapters = True
        try:
            entry = self.scheduler.append(request_of(flight, with_ids=self._needs_ids), now_ns)
        except ValidationError:
            return False
        if not flight.generated:
            self.in_system += 1
        self._flights[entry.id] = flight
        return True

    def begin(self, now_ns: int) -> int | None:
        """Execute calls of the scheduler until a step is running. Returns its end time, None if there is no work."""
        scheduler = self.scheduler
        while True:
            call = scheduler.next_call(now_ns)
            kind = type(call)
            if kind is Decode:
                return self._begin_decode(call, now_ns)  # type: ignore[arg-type]
            if kind is Prefill:
                return self._begin_prefill(call, now_ns)  # type: ignore[arg-type]
            if kind is Idle:
                self._ended = 0
                return None
            if kind is Filter:
                scheduler.on_reply(call, self._receipt(call.batch_id))  # type: ignore[union-attr]
            else:
                assert isinstance(call, Clear)
                self._rows.pop(call.batch_id, None)
                self._max_tokens.pop(call.batch_id, None)
                scheduler.on_reply(call, None)

    def cut(self, now_ns: int) -> int | None:
        """Shorten the running stride to its current step. Returns its end time, None if idle."""
        stride = self._running
        if stride is None:
            return None
        if stride.steps > 1:
            stride.steps = stride.steps_until(now_ns)
        return stride.end_ns_of(stride.steps)

    def end(self, now_ns: int) -> list[Flight]:
        """End the running step. Returns the completed requests."""
        stride = self._running
        assert stride is not None, "no step is running"
        self._running = None
        self.counts.events += 1
        if self._ranges is not None:
            self.counts.ranges.add(self._ranges, stride.work, stride.steps, now_ns - stride.started_ns)
        if stride.waiting:
            waited_ns = stride.waiting * (now_ns - stride.started_ns)
            self._waited_ns[stride.cause] = self._waited_ns.get(stride.cause, 0) + waited_ns
        call = stride.call
        if type(call) is Prefill:
            return self._end_prefill(call, stride, now_ns)
        assert isinstance(call, Decode)
        return self._end_decode(call, stride, now_ns)

    def _begin_prefill(self, call: Prefill, now_ns: int) -> int:
        new: dict[int, ShardRow] = {}
        tokens = squares = cached = prompts = 0
        for entry in call.entries:
            flight = self._flights[entry.id]
            if flight.started_ns < 0:
                flight.started_ns = now_ns
                flight.cached_tokens = entry.cached_input_tokens
            total = entry.request.input_len
            have = total - entry.remaining_prefill
            slots = self._slots_of(entry)
            left = min(
                segment_tokens(flight.declared_tokens - flight.generated), flight.output_tokens - flight.generated
            )
            new[entry.id] = ShardRow(flight, entry, slots, entry.remaining_prefill, entry.next_chunk, have, left)
            after = have + entry.next_chunk
            tokens += entry.next_chunk
            squares += after * after - have * have
            cached += have
            prompts += 1
            self.counts.cached_tokens += entry.cached_input_tokens
        self._rows[call.batch.id] = new
        self._num_prefilling += prompts
        if self._drafting is not None:
            self._drafting.with_prompts(0 if call.cached is None else self._num_decoding)
        if call.cached is not None:
            rows = self._rows[call.cached.id]
            more = prompt_work(rows.values()) if self._num_prefilling > prompts else (0, 0, 0, 0)
            decoding = self._num_decoding
            step = StepWork(
                *(prompts + more[0], tokens + more[1], squares + more[2], cached + more[3]),
                *(decoding, self._kv + decoding, self._ended),
            )
        else:
            step = StepWork(prompts, tokens, squares, cached, ended=self._ended)
        step_ns = self._law.step_ns(step)
        if self._has_adapters:
            step_ns += self._adapters_ns(new if call.cached is None else {**self._rows[call.cached.id], **new})
        return self._run(Stride(call, step, now_ns, step_ns))

    def _begin_decode(self, call: Decode, now_ns: int) -> int:
        rows = self._rows[call.batches[0].id]
        for part in call.batches[1:]:
            rows |= self._rows.pop(part.id)
            self._max_tokens[call.batches[0].id] += self._max_tokens.pop(part.id)
        decoding = self._num_decoding
        if drafts := self._drafts(rows, now_ns):
            return self._run(self._drafted_step(call, now_ns, drafts))
        work = prompt_work(rows.values()) if self._num_prefilling else (0, 0, 0, 0)
        step = StepWork(*work, decoding, self._kv + decoding, self._ended)
        step_ns, ended_ns = self._law.step_ns(step), 0.0
        steps = 1
        if self._strides and not self._num_prefilling and not self._looks_for_drafts:
            steps = self._ends[0][0] - self._step
            bound = self.scheduler.stride()
            if bound is not None and bound < steps:
                steps = bound
            if step.ended and steps > 1:
                later_ns = self._law.step_ns(step._replace(ended=0))
                step_ns, ended_ns = later_ns, step_ns - later_ns
        gain_ns = (self._law.kv_ns or 0.0) * decoding
        first_ns = step_ns + self._adapters_ns(rows)
        return self._run(Stride(call, step, now_ns, first_ns, gain_ns, steps, ended_ns=ended_ns))

    @property
    def _looks_for_drafts(self) -> bool:
        """Whether the next decode step may have drafts: steps with prompts have none."""
        drafting = self._drafting
        return drafting is not None and not self._num_prefilling and drafting.may_draft(self._num_decoding)

    def _drafts(self, rows: dict[int, ShardRow], now_ns: int) -> list[tuple[ShardRow, int]]:
        """The rows with drafts, and the drafted tokens."""
        drafting = self._drafting
        if drafting is None:
            return []
        if self._num_prefilling:
            drafting.with_prompts(self._num_decoding)
        if not self._looks_for_drafts:
            return []
        own = list(rows.values())
        proposed = drafting.propose([self._drafting_row(row) for row in own], now_ns)
        return [(row, length) for row, length in zip(own, proposed, strict=True) if length]

    def _drafting_row(self, row: ShardRow) -> DraftingRow:
        left = row.ends_at - self._step
        num_ids = row.flight.input_tokens + row.flight.generated + row.left - left
        if row.drafting is None:
            assert self._drafting is not None, "a row has a draft, but the server has none"
            row.drafting = self._drafting.row(row.flight.id, num_ids, left)
        row.drafting.num_ids, row.drafting.stopping.remaining_tokens = num_ids, left
        return row.drafting

    def _drafted_step(self, call: Decode, now_ns: int, drafts: list[tuple[ShardRow, int]]) -> Stride:
        law, decoding = self._law, self._num_decoding
        assert isinstance(law, SpeculatingLaw), "the step law has no drafts"
        drafted = sum(length for _, length in drafts)
        self.counts.drafted += drafted
        step = StepWork(rows=decoding, kv=self._kv + decoding, ended=self._ended)
        step_ns = law.drafted_step_ns(step, drafted)
        of_adapters_ns = self._adapters_ns(self._rows[call.batches[0].id], {id(row): length for row, length in drafts})
        return Stride(call, step, now_ns, step_ns + of_adapters_ns, drafts=drafts)

    def _adapters_ns(self, rows: dict[int, ShardRow], drafted: Mapping[int, int] = NO_DRAFTS) -> float:
        """The time of adapters in a step of these rows. drafted: tokens of the draft by the identity of a row."""
        if not self._has_adapters or self._adapted_law is None:
            return 0.0
        adapters, tokens = set(), 0
        for row in rows.values():
            if row.flight.adapter is not None and not row.has_ended:
                adapters.add(row.flight.adapter)
                tokens += row.next_chunk if row.remaining_prefill else 1 + drafted.get(id(row), 0)
        return self._adapted_law.adapters_ns(len(adapters), tokens)

    def _accept(self, drafts: list[tuple[ShardRow, int]]) -> None:
        """Move the ends of rows with accepted drafts forward. The step in progress is still to be counted."""
        for row, length in drafts:
            assert self._drafting is not None, "a row has a draft, but the server has none"
            assert row.drafting is not None, "a row with a draft has no drafting state"
            count = self._drafting.accepted(row.drafting, length)
            if not count:
                continue
            row.ends_at -= count
            heapq.heappush(self._ends, (row.ends_at, row.entry.id))
            self._kv += count
            self.counts.accepted += count
            if self._step_times is not None:
                row.accepted.append((len(self._step_times) - row.times_from, count))

    def _run(self, stride: Stride) -> int:
        self._running = stride
        stride.waiting = self.scheduler.queue_size
        if stride.waiting:
            stride.cause = self._cause_of_waiting(stride)
        if self._on_call is not None:
            self._on_call(stride.call, stride.started_ns)
        return stride.end_ns_of(stride.steps)

    def _cause_of_waiting(self, stride: Stride) -> str:
        """Why the first queued request is not in this step. Later requests wait for the same reason."""
        if type(stride.call) is Prefill or self._num_prefilling:
            return "budget"
        if self._max_batch_size is not None and self.rows >= self._max_batch_size:
            return "batch_size"
        return "blocks" if self._chunks or self.scheduler.stride() is None else "ratio"

    def waiting_fractions(self) -> dict[str, float]:
        """Fractions of all waiting time by cause: budget, ratio, blocks or batch_size."""
        total_ns = sum(self._waited_ns.values())
        return {cause: waited / total_ns for cause, waited in sorted(self._waited_ns.items())} if total_ns else {}

    def _slots_of(self, entry: Entry) -> int:
        admission = entry.admitted
        assert admission is not None, "an admitted entry has an admission"
        if admission.allocation is not None:
            return len(admission.allocation.blocks) * self._block_size
        request = entry.request
        return round_up(request.input_len + request.wire.stopping.max_new_tokens - 1, self._block_size)

    def _end_prefill(self, call: Prefill, stride: Stride, now_ns: int) -> list[Flight]:
        counts = self.counts
        counts.prefills += 1
        counts.prefill_ns += now_ns - stride.started_ns
        new = self._rows[call.batch.id]
        new_tokens = sum(row.slots for row in new.values())
        if call.cached is None:
            batch_id, rows = call.batch.id, new
            self._max_tokens[batch_id] = new_tokens
            ended: list[ShardRow] = []
        else:
            batch_id = call.cached.id
            rows = self._rows[batch_id]
            del self._rows[call.batch.id]
            self._max_tokens[batch_id] += new_tokens
            ended = self._advance_decodes(rows, 1, now_ns, stride)
            rows |= new
        ended += self._advance_prefills(rows, new, now_ns)
        return self._reply(call, batch_id, rows, ended, 1, now_ns)

    def _end_decode(self, call: Decode, stride: Stride, now_ns: int) -> list[Flight]:
        counts = self.counts
        counts.decodes += stride.steps
        counts.decode_ns += now_ns - stride.started_ns
        batch_id = call.batches[0].id
        rows = self._rows[batch_id]
        self._accept(stride.drafts)
        ended = self._advance_decodes(rows, stride.steps, now_ns, stride)
        if self._num_prefilling:
            ended += self._advance_prefills(rows, {}, now_ns)
        return self._reply(call, batch_id, rows, ended, stride.steps, now_ns)

    def _advance_decodes(self, rows: dict[int, ShardRow], steps: int, now_ns: int, stride: Stride) -> list[ShardRow]:
        """Advance every decoding row by `steps` tokens. Returns the rows that end."""
        decoding = self._num_decoding
        if not decoding:
            return []
        self._step += steps
        self._kv += steps * decoding
        self.counts.row_steps += steps * decoding
        if self._kv > self.counts.kv_peak:
            self.counts.kv_peak = self._kv
        if self._step_times is not None:
            self._step_times += [stride.end_ns_of(count) for count in range(1, steps)]
            self._step_times.append(now_ns)
        ended: list[ShardRow] = []
        ends, step = self._ends, self._step
        while ends and ends[0][0] <= step:
            ends_at, entry_id = heapq.heappop(ends)
            row = rows.get(entry_id)
            if row is None or row.ends_at != ends_at or row.has_ended:
                continue  # an accepted draft moved the end of this row forward
            row.has_ended = True
            self._num_decoding -= 1
            self._kv -= row.context + row.left - 1
            ended.append(row)
        return ended

    def _advance_prefills(self, rows: dict[int, ShardRow], new: dict[int, ShardRow], now_ns: int) -> list[ShardRow]:
        """Advance every prefilling row by its chunk. Returns the rows that end with their first token."""
        ended: list[ShardRow] = []
        were_all_new = self._num_prefilling == len(new)
        for row in (new if were_all_new else rows).values():
            if not row.remaining_prefill:
                continue
            self.counts.prompt_tokens += row.next_chunk
            row.context += row.next_chunk
            if row.remaining_prefill > row.next_chunk:
                continue
            self._num_prefilling -= 1
            flight = row.flight
            if flight.first_ns < 0:
                flight.first_ns = now_ns
            if self._step_times is not None:
                flight.token_ns.append(now_ns)
                row.times_from = len(self._step_times)
            if row.left == 1:
                ended.append(row)
                continue
            row.ends_at = self._step + row.left - 1
            heapq.heappush(self._ends, (row.ends_at, row.entry.id))
            self._num_decoding += 1
            self._kv += row.context
        if count_forward(rows.values() if not were_all_new else new.values()) and self._num_prefilling:
            plan_chunks(list(rows.values()), self._chunk_budget)
        return ended

    def _reply(
        self,
        call: Prefill | Decode,
        batch_id: int,
        rows: dict[int, ShardRow],
        ended: list[ShardRow],
        steps: int,
        now_ns: int,
    ) -> list[Flight]:
        """Reply to the Scheduler, which needs only the ended rows. Returns the completed requests."""
        self._ended = len(ended)
        if not ended:
            self.scheduler.on_reply(call, StepResult((), self._receipt(batch_id)), num_steps=steps)
            return []
        generations = tuple([Generation(row.entry.id, _TOKEN, generated_text=_ENDED) for row in ended])
        receipt = self._receipt(batch_id) if len(ended) < len(rows) else None
        self.scheduler.on_reply(call, StepResult(generations, receipt), num_steps=steps)
        for row in ended:
            del rows[row.entry.id]
            if receipt is not None:
                self._max_tokens[batch_id] -= row.slots
        if receipt is None:
            del self._rows[batch_id]
            del self._max_tokens[batch_id]
        return [row.flight for row in ended if self._finish_segment(row, now_ns)]

    def _finish_segment(self, row: ShardRow, now_ns: int) -> bool:
        """Add the tokens of an ended row to its request; false if the request has another segment, which is queued."""
        flight = row.flight
        del self._flights[row.entry.id]
        flight.generated += row.left
        if self._step_times is not None:
            flight.token_ns += self._token_times(row)
        if flight.generated < flight.output_tokens and self.submit(flight, now_ns):
            return False
        self.in_system -= 1
        flight.end_ns = now_ns
        flight.status = "ok"
        return True

    def _token_times(self, row: ShardRow) -> list[int]:
        """The times of a row's tokens after the first: accepted drafts have the time of their step."""
        assert self._step_times is not None, "the times of steps are recorded"
        beyond = dict(row.accepted)
        steps = row.left - 1 - sum(beyond.values())
        times = self._step_times[row.times_from : row.times_from + steps]
        return [at_ns for place, at_ns in enumerate(times) for _ in range(1 + beyond.get(place, 0))]

    def _receipt(self, batch_id: int) -> CachedBatch:
        rows = self._rows[batch_id]
        current = len(rows)
        if self._num_prefilling:
            current = sum([row.next_chunk if row.remaining_prefill else 1 for row in rows.values()])
        return CachedBatch(batch_id, tuple(rows), self._max_tokens[batch_id], current)
