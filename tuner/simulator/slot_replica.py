"""One simulated server with slots: requests are decoded in slots, first come, first served.

The rule has few parameters, so they can be fitted to client timings. K/V memory is not modelled: a slot is assumed to
have enough K/V memory for any request.
"""

import heapq
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from reference_server.router.scheduling.step_work import StepWork
from tuner.errors import NotSimulatedError
from tuner.simulator.replica_state import Counts, Flight
from tuner.simulator.step_law import StepLaw, steps_until, stride_ns

# More prompt tokens than any step computes: no limit.
UNLIMITED_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class SlotRule:
    """The batching rule of a server with slots.

    slots: largest number of requests in the batch. prefill_tokens, prefill_prompts: largest number of prompt tokens and
    of prompts in one step. mixes_prefill: rows decode in the same step as prompts and count as tokens; otherwise they
    wait. steps_between: number of steps after new requests joined decoding rows, before others can join.
    """

    slots: int
    prefill_tokens: int = UNLIMITED_TOKENS
    prefill_prompts: int | None = None
    mixes_prefill: bool = True
    steps_between: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Slot:
    """A request in a slot. `context`: tokens with K/V. `remaining`: prompt tokens without K/V, `chunk` in this step."""

    flight: Flight
    remaining: int
    context: int = 0
    chunk: int = 0
    times_from: int = 0


@dataclass(slots=True)
class _Run:
    """The running step, or several decode steps as one."""

    started_ns: int
    first_ns: float
    gain_ns: float
    steps: int
    chunks: list[_Slot] = field(default_factory=list)
    decodes: bool = True

    @property
    def end_ns(self) -> int:
        return self.started_ns + round(stride_ns(self.first_ns, self.gain_ns, self.steps))


class SlotReplica:
    """Simulates the steps of a `SlotRule` with the times of a step law. The methods are those of `Replica`."""

    def __init__(self, rule: SlotRule, law: StepLaw, *, with_strides: bool = True, with_gaps: bool = False) -> None:
        self.counts = Counts()
        self.in_system = 0
        self._rule = rule
        self._law = law
        self._strides = with_strides and law.kv_ns is not None
        self._waiting: deque[Flight] = deque()
        self._prefilling: list[_Slot] = []
        self._ends: list[tuple[int, int, _Slot]] = []  # (decode step, request, slot) of rows that decode
        self._step = self._kv = 0
        self._pause = 0  # steps until new requests may join rows that decode
        self._run: _Run | None = None
        self._step_times: list[int] | None = [] if with_gaps else None
        self._waited_ns = 0

    def submit(self, flight: Flight, now_ns: int) -> bool:  # noqa: ARG002 - the signature of Replica
        """Queue a request. Every request is accepted. Raises NotSimulatedError for an adapter."""
        if flight.adapter is not None:
            raise NotSimulatedError("the load has LoRA adapters, whose cost is not known from client timings")
        self._waiting.append(flight)
        self.in_system += 1
        return True

    def begin(self, now_ns: int) -> int | None:
        """Fill the slots and begin a step. Returns its end time, None if there is no work."""
        rule = self._rule
        busy = self._busy
        while self._waiting and self._busy < rule.slots and not (busy and self._pause):
            flight = self._waiting.popleft()
            flight.started_ns = now_ns
            self._prefilling.append(_Slot(flight, flight.input_tokens))
        if not self._busy:
            return None
        if busy and self._busy > busy:
            self._pause = rule.steps_between + 1
        chunks = self._plan_chunks() if self._prefilling else []
        decodes = bool(self._ends) and (rule.mixes_prefill or not chunks)
        rows = len(self._ends) if decodes else 0
        work = StepWork(*_prompt_work(chunks), rows, self._kv + rows if decodes else 0)
        steps = self._ends[0][0] - self._step if self._strides and not chunks else 1
        if self._waiting and self._pause:
            steps = min(steps, self._pause)
        self._run = _Run(now_ns, self._law.step_ns(work), (self._law.kv_ns or 0.0) * rows, steps, chunks, decodes)
        return self._run.end_ns

    def cut(self, now_ns: int) -> int | None:
        """If a slot is free, shorten the running decode steps to the current one. Returns the end, None if idle."""
        run = self._run
        if run is None:
            return None
        if run.steps > 1 and self._busy < self._rule.slots:
            run.steps = steps_until(run.first_ns, run.gain_ns, now_ns - run.started_ns, run.steps)
        return run.end_ns

    def end(self, now_ns: int) -> list[Flight]:
        """End the running steps. Returns the completed requests."""
        run, counts = self._run, self.counts
        assert run is not None, "no step is running"
        self._run = None
        self._pause = max(0, self._pause - run.steps)
        counts.events += 1
        taken_ns = now_ns - run.started_ns
        self._waited_ns += len(self._waiting) * taken_ns
        if run.chunks:
            counts.prefills += 1
            counts.prefill_ns += taken_ns
        else:
            counts.decodes += run.steps
            counts.decode_ns += taken_ns
        ended = self._advance_decodes(run, now_ns) if run.decodes else []
        ended += self._advance_prefills(run.chunks, now_ns)
        for slot in ended:
            self.in_system -= 1
            flight = slot.flight
            flight.generated, flight.end_ns, flight.status = flight.output_tokens, now_ns, "ok"
            if self._step_times is not None:
                flight.token_ns += self._step_times[slot.times_from : slot.times_from + flight.output_tokens - 1]
        return [slot.flight for slot in ended]

    def waiting_fractions(self) -> dict[str, float]:
        """Fractions of all waiting time by cause. The only cause is `slots`."""
        return {"slots": 1.0} if self._waited_ns else {}

    @property
    def _busy(self) -> int:
        return len(self._prefilling) + len(self._ends)

    def _plan_chunks(self) -> list[_Slot]:
        """The prompts of the next step in order of arrival, with their `chunk` set."""
        rule = self._rule
        left = max(1, rule.prefill_tokens - (len(self._ends) if rule.mixes_prefill else 0))
        chunks = []
        for slot in self._prefilling[: rule.prefill_prompts]:
            if not left:
                break
            slot.chunk = min(slot.remaining, left)
            left -= slot.chunk
            chunks.append(slot)
        return chunks

    def _advance_decodes(self, run: _Run, now_ns: int) -> list[_Slot]:
        """Advance every decoding row. Returns the rows that end."""
        rows, counts = len(self._ends), self.counts
        self._step += run.steps
        self._kv += run.steps * rows
        counts.row_steps += run.steps * rows
        counts.kv_peak = max(counts.kv_peak, self._kv)
        if self._step_times is not None:
            self._step_times += [
                run.started_ns + round(stride_ns(run.first_ns, run.gain_ns, number)) for number in range(1, run.steps)
            ]
            self._step_times.append(now_ns)
        ended = []
        while self._ends and self._ends[0][0] <= self._step:
            slot = heapq.heappop(self._ends)[2]
            self._kv -= slot.context + slot.flight.output_tokens - 1
            ended.append(slot)
        return ended

    def _advance_prefills(self, chunks: list[_Slot], now_ns: int) -> list[_Slot]:
        """Advance the prompts of a step. Returns the requests that end with their first token."""
        ended = []
        for slot in chunks:
            self.counts.prompt_tokens += slot.chunk
            slot.context += slot.chunk
            slot.remaining -= slot.chunk
            if slot.remaining:
                continue
            self._prefilling.remove(slot)
            flight = slot.flight
            flight.first_ns = now_ns
            if self._step_times is not None:
                flight.token_ns.append(now_ns)
                slot.times_from = len(self._step_times)
            if flight.output_tokens == 1:
                ended.append(slot)
                continue
            heapq.heappush(self._ends, (self._step + flight.output_tokens - 1, flight.id, slot))
            self._kv += slot.context
        return ended


def _prompt_work(chunks: list[_Slot]) -> tuple[int, int, int, int]:
    """Prompts, tokens, squares and cached tokens of a step, in the order of `StepWork`."""
    tokens = sum(slot.chunk for slot in chunks)
    squares = sum((slot.context + slot.chunk) ** 2 - slot.context**2 for slot in chunks)
    return len(chunks), tokens, squares, sum(slot.context for slot in chunks)
