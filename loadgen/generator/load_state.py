"""The state of a running load: next request, requests in flight, errors. Driven by the users; independent of locust.

Times are monotonic ns.
"""

import errno
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from loadgen.generator.load_window import LoadEnd, LoadWindow
from loadgen.generator.recent_errors import RecentErrors
from loadgen.generator.recorder import Recorder, Times, make_record
from loadgen.generator.request_bodies import Conversations
from loadgen.http.arrival_times import Clock
from loadgen.http.balancing import Replicas
from loadgen.http.call import CallCancelled, Client
from loadgen.http.response_reader import ClientCall
from loadgen.workloads.departure import Departure
from loadgen.workloads.prompts.prompt import ClipCount, Prompt
from loadgen.workloads.structured import Constraint, StructuredShare
from reports.run_schema import Phase, RequestRecord, Status

# After this many connection errors in a row the server is considered gone.
MAX_CONNECT_ERRORS_IN_A_ROW = 50
# Statuses set by the load generator; not errors of the server.
CLIENT_ENDS = frozenset((Status.CANCELLED, Status.UNFINISHED, Status.CLIENT_ERROR, Status.ABANDONED))


@dataclass(slots=True)
class LoadState:
    """State shared by the users. `start` begins the load; once `is_over`, nothing more is sent.

    `requests` is endless: the load goes on after its window. `stopped_by` is the reason to send nothing more.
    """

    run_id: str
    window: LoadWindow
    requests: Iterator[tuple[Prompt, bytes]]
    client: Client | Replicas
    recorder: Recorder
    clock_ns: Clock
    worker: int = 0
    conversations: Conversations | None = None
    departure: Departure | None = None
    structure: StructuredShare | None = None
    clipped: ClipCount = field(default_factory=ClipCount)
    stopped_by: str | None = None
    client_errors: list[str] = field(default_factory=list)
    write_errors: int = 0
    last_end_ns: int | None = None
    _connect_errors: int = 0
    _errors: int = 0
    _sessions: dict[int, deque[tuple[Prompt, bytes]]] = field(default_factory=dict)
    _recent_errors: RecentErrors = field(default_factory=RecentErrors)
    _running: dict[int, ClientCall] = field(default_factory=dict)

    def start(self, at_ns: int | None = None) -> None:
        """Set time zero of the run, by default now; only the first call counts."""
        self.window.start(at_ns or self.clock_ns())

    @property
    def start_ns(self) -> int:
        return self.window.start_ns

    @property
    def limits(self) -> LoadEnd:
        return self.window.limits

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def errors(self) -> int:
        """Failed requests of warm-up and window, without those that the load generator ended."""
        return self._errors

    @property
    def stop_reason(self) -> str | None:
        """Why the window ended."""
        return self.window.reason

    def end_window(self, reason: str) -> None:
        """End the window now; the load goes on."""
        self.window.end(reason, self.clock_ns())

    def stop(self, reason: str) -> None:
        """Send nothing more; ends the window if it has not ended."""
        self.end_window(reason)
        self.stopped_by = self.stopped_by or reason

    @property
    def is_over(self) -> bool:
        return self.stopped_by is not None

    @property
    def phase(self) -> Phase:
        """The phase now."""
        return self.window.phase_at(self.clock_ns())

    def tokens_seen(self) -> int:
        """Token events received so far, including those of requests in flight."""
        return self.recorder.live.tokens_out + sum(len(each.answer.event_ns) for each in self._running.values())

    def tick(self) -> None:
        """Move from warm-up to window to drain, as time passes."""
        self.window.tick(self.clock_ns())

    def next_request(self, slot: int | None = None) -> tuple[Prompt, bytes] | None:
        """The next request of a free user; None once the load is over.

        A user within a session gets its remaining turns first.
        """
        self.tick()
        if self.is_over:
            return None
        turns = self._sessions.get(slot) if slot is not None else None
        request = turns.popleft() if turns else next(self.requests)
        if slot is not None and request[0].turns_left and not turns:
            self._sessions[slot] = deque(itertools.islice(self.requests, request[0].turns_left))
        return request

    def next_session(self) -> list[tuple[Prompt, bytes]] | None:
        """A request and the following turns of its session; None once the load is over."""
        request = self.next_request()
        return None if request is None else [request, *itertools.islice(self.requests, request[0].turns_left)]

    def send(self, prompt: Prompt, body: bytes, times: Times, slot: int | None = None) -> Status:
        """Send one request and record it. Raises CallCancelled after it is recorded."""
        call = ClientCall(leaves_after_tokens=self.departure.of(prompt.prompt_id) if self.departure else None)
        key = id(prompt)
        constraint = self.structure.of(prompt.prompt_id) if self.structure else None
        if self.conversations is not None or constraint is not None:
            call.answer.pieces = []
        if self.conversations is not None:
            prompt, body = self.conversations.complete(prompt, body)
        if slot is not None:
            self.window.begin(key, times.dispatch_ns)
        self._running[id(call)] = call
        live = self.recorder.live
        live.sent += 1
        number = live.sent
        if self._phase_of(times, slot) != Phase.DRAIN:
            self.clipped.add(prompt)
        try:
            self.client.run(body, call)
        except Exception as error:
            call.status, call.error_type = Status.CLIENT_ERROR, f"client/{type(error).__name__}: {error}"
            self.client_errors.append(str(call.error_type))
        finally:
            del self._running[id(call)]
            self.window.forget(key, slot)
            phase = self._phase_of(times, slot)
            call.status = _end_of(call.status, phase)
            self._note(call, phase, number)
            _check(call, constraint)
            request_id = self._id_of(str(number))
            record = make_record(self.run_id, request_id, self.start_ns, phase, prompt, times, call, self.worker)
            self._store(record)
        if self.conversations is not None:
            self.conversations.record(prompt, call.answer, is_ok=call.status == Status.OK)
        return call.status

    def skip(self, prompt: Prompt, times: Times, cancelled: CallCancelled) -> None:
        """Record a request that was cancelled while it waited at the in-flight limit, unless it is of the drain."""
        self.window.forget(id(prompt))
        phase = self._phase_of(times)
        if phase == Phase.DRAIN:
            return
        status = _end_of(cancelled.status, phase)
        call = ClientCall(status=status, error_type="connect/limit", end_ns=self.clock_ns())
        request_id = self._id_of(f"w{self.recorder.live.failed}-{prompt.prompt_id}")
        self._store(make_record(self.run_id, request_id, self.start_ns, phase, prompt, times, call, self.worker))

    def _phase_of(self, times: Times, slot: int | None = None) -> Phase:
        """By the scheduled start in an open loop, by the real one of a user in a closed loop."""
        return self.window.phase_at(times.intended_ns if slot is None else times.dispatch_ns)

    def _id_of(self, name: str) -> str:
        """A request id that is unique among all workers."""
        return f"{self.run_id}-{self.worker}-{name}" if self.worker else f"{self.run_id}-{name}"

    def _note(self, call: ClientCall, phase: Phase, number: int) -> None:
        self.last_end_ns = call.end_ns
        if phase != Phase.DRAIN:
            self._count_error(call.status, number)
        if call.status != Status.CONNECT_ERROR:
            self._connect_errors = 0
            return
        self._connect_errors += 1
        if self._connect_errors >= MAX_CONNECT_ERRORS_IN_A_ROW:
            self.stop("server_unreachable")

    def _count_error(self, status: Status, number: int) -> None:
        is_error = None if status in CLIENT_ENDS else status != Status.OK
        share, limits = self._recent_errors.add(number, is_error), self.limits
        if is_error is None:
            return
        self._errors += is_error
        if limits.max_errors is not None and self._errors >= limits.max_errors:
            self.stop("error_count")
        if limits.max_error_share is not None and share > limits.max_error_share:
            self.stop("error_share")

    def _store(self, record: RequestRecord) -> None:
        try:
            self.recorder.add(record)
        except OSError as error:
            self.write_errors += 1
            self.client_errors.append(f"cannot write records: {error.strerror}")
            self.stop("no_space" if error.errno == errno.ENOSPC else "records_lost")


def _check(call: ClientCall, constraint: Constraint | None) -> None:
    """Record the structure of an answer and, if the answer is complete, whether it is valid."""
    if constraint is not None:
        call.constraint = constraint.kind
        if call.status == Status.OK:
            call.validity = constraint.check(call.answer.text, call.answer.finish_reason)


def _end_of(status: Status, phase: Phase) -> Status:
    """A request that the drain limit ended is `unfinished` if it was measured, else `cancelled`."""
    return Status.CANCELLED if status == Status.UNFINISHED and phase != Phase.MEASURE else status
