"""The state of a running load: phases, limits, requests in flight. Driven by the users; independent of locust.

Times are monotonic ns.
"""

import errno
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from loadgen.generator.recorder import Recorder, Times, make_record
from loadgen.generator.request_bodies import Conversations
from loadgen.http.arrival_times import Clock
from loadgen.http.call import CallCancelled, Client
from loadgen.http.response_reader import ClientCall
from loadgen.workloads.prompt import ClipCount, Prompt
from reports.run_schema import Phase, RequestRecord, Status

NS_PER_S = 1_000_000_000
# After this many connection errors in a row the server is considered gone.
MAX_CONNECT_ERRORS_IN_A_ROW = 50
ERROR_WINDOW = 50
# Statuses set by the load generator; not errors of the server.
CLIENT_ENDS = frozenset((Status.CANCELLED, Status.UNFINISHED, Status.CLIENT_ERROR))


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """When the warm-up and the load end: `requests` and `duration_s` count from the end of the warm-up.

    A warm-up lasts until `slots` users of a closed loop have each completed a request. `max_error_share` is a fraction
    of the last `ERROR_WINDOW` requests.
    """

    warmup_s: float
    duration_s: float | None
    requests: int | None
    slots: int | None
    max_errors: int | None = None
    max_error_share: float | None = None


@dataclass(slots=True)
class LoadState:
    """State shared by the users. `start` begins the load; once `stop_reason` is set nothing more is sent.

    `on_warm` is for one worker of several: it is called once when the warm-up is over in this worker. `measure_from` is
    called when it is over in all workers.
    """

    run_id: str
    limits: LoadEnd
    requests: Iterator[tuple[Prompt, bytes]]
    client: Client
    recorder: Recorder
    clock_ns: Clock
    worker: int = 0
    on_warm: Callable[[int], None] | None = None
    conversations: Conversations | None = None
    clipped: ClipCount = field(default_factory=ClipCount)
    start_ns: int = 0
    measure_ns: int | None = None
    stop_ns: int | None = None
    stop_reason: str | None = None
    measured: int = 0
    client_errors: list[str] = field(default_factory=list)
    write_errors: int = 0
    last_sent_ns: int | None = None
    last_end_ns: int | None = None
    _is_warm: bool = False
    _slots_done: set[int] = field(default_factory=set)
    _connect_errors: int = 0
    _errors: int = 0
    _sessions: dict[int, deque[tuple[Prompt, bytes]]] = field(default_factory=dict)
    _recent_errors: deque[bool] = field(default_factory=lambda: deque(maxlen=ERROR_WINDOW))
    _running: dict[int, ClientCall] = field(default_factory=dict)

    def start(self, at_ns: int | None = None) -> None:
        """Set time zero of the run, by default now; only the first call counts."""
        if self.start_ns:
            return
        self.start_ns = at_ns or self.clock_ns()
        if self.limits.warmup_s == 0:
            self.measure_ns = self.start_ns

    def measure_from(self, at_ns: int) -> None:
        """Start the measurement: the warm-up is over in every worker."""
        if self.measure_ns is None:
            self.measure_ns = at_ns

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def errors(self) -> int:
        """Failed requests, without those that the load generator ended."""
        return self._errors

    @property
    def is_over(self) -> bool:
        return self.stop_reason is not None

    def stop(self, reason: str) -> None:
        """Send nothing more; the first reason stays."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.stop_ns = self.clock_ns()

    @property
    def phase(self) -> Phase:
        """The phase now."""
        return self.phase_at(self.clock_ns())

    def phase_at(self, at_ns: int) -> Phase:
        if self.stop_ns is not None and at_ns > self.stop_ns:
            return Phase.DRAIN
        return Phase.WARMUP if self.measure_ns is None or at_ns < self.measure_ns else Phase.MEASURE

    @property
    def window_end_ns(self) -> int | None:
        """The end of the measurement: by the clock, or at the last send if the requests ran out.

        If all requests were sent nearly at once, it is the end of the last answer.
        """
        if self.stop_reason not in ("requests", "end_of_trace") or self.last_sent_ns is None:
            return self.stop_ns
        last_end_ns = self.last_end_ns or self.last_sent_ns
        is_burst = self.last_sent_ns - self.start_ns < (last_end_ns - self.start_ns) / 2
        return last_end_ns if is_burst else self.last_sent_ns

    def tokens_seen(self) -> int:
        """Token events received so far, including those of requests in flight."""
        return self.recorder.live.tokens_out + sum(len(each.answer.event_ns) for each in self._running.values())

    def tick(self) -> None:
        """Move from warm-up to measurement to the end, as time passes."""
        now_ns = self.clock_ns()
        if self.measure_ns is None and not self._is_warm:
            self._end_warmup(self._warm_since(now_ns))
        if self.measure_ns is None or self.limits.duration_s is None or self.is_over:
            return
        end_ns = self.measure_ns + round(self.limits.duration_s * NS_PER_S)
        if now_ns >= end_ns:
            self.stop("duration")
            self.stop_ns = end_ns

    def _end_warmup(self, warm_ns: int | None) -> None:
        if warm_ns is None:
            return
        if self.on_warm is None or self.limits.slots is None:
            self.measure_ns = warm_ns
            return
        self._is_warm = True
        self.on_warm(warm_ns)

    def _warm_since(self, now_ns: int) -> int | None:
        """When the warm-up ended; None while it lasts."""
        end_ns = self.start_ns + round(self.limits.warmup_s * NS_PER_S)
        if now_ns < end_ns:
            return None
        if self.limits.slots is None:
            return end_ns
        return now_ns if len(self._slots_done) >= self.limits.slots else None

    def next_request(self, slot: int | None = None) -> tuple[Prompt, bytes] | None:
        """The next request of a free user; None once the load is over. The last request ends the load.

        A user within a session gets its remaining turns first.
        """
        self.tick()
        if self.is_over:
            return None
        if self.limits.requests is not None and self.measured >= self.limits.requests:
            self.stop("requests")
            return None
        turns = self._sessions.get(slot) if slot is not None else None
        request = turns.popleft() if turns else next(self.requests, None)
        if request is None:
            self.stop("end_of_trace")
            return None
        if slot is not None and request[0].turns_left and not turns:
            self._sessions[slot] = deque(itertools.islice(self.requests, request[0].turns_left))
        self.measured += self.measure_ns is not None and self.clock_ns() >= self.measure_ns
        return request

    def next_session(self) -> list[tuple[Prompt, bytes]] | None:
        """A request and the following turns of its session; None once the load is over."""
        request = self.next_request()
        return None if request is None else [request, *itertools.islice(self.requests, request[0].turns_left)]

    def send(self, prompt: Prompt, body: bytes, times: Times, slot: int | None = None) -> Status:
        """Send one request and record it. Raises CallCancelled after it is recorded."""
        call = ClientCall()
        if self.conversations is not None:
            call.answer.pieces = []
            prompt, body = self.conversations.complete(prompt, body)
        # The phase depends on the scheduled start in an open loop, on the real start in a closed loop.
        phase = self.phase_at(times.intended_ns if self.limits.slots is None else times.dispatch_ns)
        self._running[id(call)] = call
        live = self.recorder.live
        live.sent += 1
        request_id = self._id_of(str(live.sent))
        self.clipped.add(prompt)
        try:
            self.client.run(body, call)
        except Exception as error:
            call.status, call.error_type = Status.CLIENT_ERROR, f"client/{type(error).__name__}: {error}"
            self.client_errors.append(str(call.error_type))
        finally:
            del self._running[id(call)]
            self._note(call)
            record = make_record(self.run_id, request_id, self.start_ns, phase, prompt, times, call, self.worker)
            self._store(record)
        if self.conversations is not None:
            self.conversations.record(prompt, call.answer, is_ok=call.status == Status.OK)
        if slot is not None:
            self._slots_done.add(slot)
        return call.status

    def skip(self, prompt: Prompt, times: Times, cancelled: CallCancelled) -> None:
        """Record a request that was cancelled while it waited at the in-flight limit."""
        call = ClientCall(status=cancelled.status, error_type="connect/limit", end_ns=self.clock_ns())
        request_id = self._id_of(f"w{self.recorder.live.failed}-{prompt.prompt_id}")
        phase = self.phase_at(times.intended_ns)
        self._store(make_record(self.run_id, request_id, self.start_ns, phase, prompt, times, call, self.worker))

    def _id_of(self, name: str) -> str:
        """A request id that is unique among all workers."""
        return f"{self.run_id}-{self.worker}-{name}" if self.worker else f"{self.run_id}-{name}"

    def _note(self, call: ClientCall) -> None:
        self.last_end_ns = call.end_ns
        if call.sent_ns is not None:
            self.last_sent_ns = max(self.last_sent_ns or 0, call.sent_ns)
        self._count_error(call.status)
        if call.status != Status.CONNECT_ERROR:
            self._connect_errors = 0
            return
        self._connect_errors += 1
        if self._connect_errors >= MAX_CONNECT_ERRORS_IN_A_ROW:
            self.stop("server_unreachable")

    def _count_error(self, status: Status) -> None:
        if status in CLIENT_ENDS:
            return
        is_error = status != Status.OK
        self._errors += is_error
        self._recent_errors.append(is_error)
        limits = self.limits
        if limits.max_errors is not None and self._errors >= limits.max_errors:
            self.stop("error_count")
        is_full = len(self._recent_errors) == ERROR_WINDOW
        share = sum(self._recent_errors) / ERROR_WINDOW
        if limits.max_error_share is not None and is_full and share > limits.max_error_share:
            self.stop("error_share")

    def _store(self, record: RequestRecord) -> None:
        try:
            self.recorder.add(record)
        except OSError as error:
            self.write_errors += 1
            self.client_errors.append(f"cannot write records: {error.strerror}")
            self.stop("no_space" if error.errno == errno.ENOSPC else "records_lost")
