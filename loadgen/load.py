"""The state of a load while it runs: phases, stop rules, what is in flight. Driven by the users; knows no locust.

Times are monotonic ns.
"""

import errno
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from loadgen.connection import Clock
from loadgen.conversations import Conversations
from loadgen.datasets.prompt import ClipCount, Prompt
from loadgen.exchange import Client, Cut
from loadgen.reception import Exchange
from loadgen.recorder import Recorder, Times, make_record
from reports.records import Phase, RequestRecord, Status

NS_PER_S = 1_000_000_000
# So many connections refused in a row mean that nothing listens any more.
MAX_CONNECT_ERRORS_IN_A_ROW = 50
ERROR_WINDOW = 50
# What the generator itself ended is no error of the server's.
OWN_ENDS = frozenset((Status.CANCELLED, Status.UNFINISHED, Status.CLIENT_ERROR))


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a load ends: `requests` and `duration_s` count from the end of the warm-up.

    `slots` of a closed loop each complete a request before a warm-up is over. `max_error_share` is of the last
    `ERROR_WINDOW` requests.
    """

    warmup_s: float
    duration_s: float | None
    requests: int | None
    slots: int | None
    max_errors: int | None = None
    max_error_share: float | None = None


@dataclass(slots=True)
class Load:
    """What the users share. `start` begins it; once `stop_reason` is set nothing more is sent.

    `on_warm` is for one worker of several: it is told once when the warm-up was over here, and `measure_from` later
    says when it was over everywhere.
    """

    run_id: str
    rules: StopRules
    feed: Iterator[tuple[Prompt, bytes]]
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
    _running: dict[int, Exchange] = field(default_factory=dict)

    def start(self, at_ns: int | None = None) -> None:
        """The zero of the run, now unless said; only the first call counts."""
        if self.start_ns:
            return
        self.start_ns = at_ns or self.clock_ns()
        if self.rules.warmup_s == 0:
            self.measure_ns = self.start_ns

    def measure_from(self, at_ns: int) -> None:
        """The warm-up is over in every worker."""
        if self.measure_ns is None:
            self.measure_ns = at_ns

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def errors(self) -> int:
        """Requests that failed by the server's fault."""
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
        """Where the run is now."""
        return self.phase_at(self.clock_ns())

    def phase_at(self, at_ns: int) -> Phase:
        if self.stop_ns is not None and at_ns > self.stop_ns:
            return Phase.DRAIN
        return Phase.WARMUP if self.measure_ns is None or at_ns < self.measure_ns else Phase.MEASURE

    @property
    def window_end_ns(self) -> int | None:
        """Where the measurement ended: by the clock, or with the last send of a load that ran out.

        A load that was sent all but at once has its end where the last answer ended.
        """
        if self.stop_reason not in ("requests", "end_of_trace") or self.last_sent_ns is None:
            return self.stop_ns
        last_end_ns = self.last_end_ns or self.last_sent_ns
        was_at_once = self.last_sent_ns - self.start_ns < (last_end_ns - self.start_ns) / 2
        return last_end_ns if was_at_once else self.last_sent_ns

    def tokens_seen(self) -> int:
        """Token events received so far, those of requests still in flight included."""
        return self.recorder.live.tokens_out + sum(len(each.answer.event_ns) for each in self._running.values())

    def tick(self) -> None:
        """Move from warm-up to measurement to the end, as time passes."""
        now_ns = self.clock_ns()
        if self.measure_ns is None and not self._is_warm:
            self._end_warmup(self._warm_since(now_ns))
        if self.measure_ns is None or self.rules.duration_s is None or self.is_over:
            return
        end_ns = self.measure_ns + round(self.rules.duration_s * NS_PER_S)
        if now_ns >= end_ns:
            self.stop("duration")
            self.stop_ns = end_ns

    def _end_warmup(self, warm_ns: int | None) -> None:
        if warm_ns is None:
            return
        if self.on_warm is None or self.rules.slots is None:
            self.measure_ns = warm_ns
            return
        self._is_warm = True
        self.on_warm(warm_ns)

    def _warm_since(self, now_ns: int) -> int | None:
        """When the warm-up ended; None while it lasts."""
        end_ns = self.start_ns + round(self.rules.warmup_s * NS_PER_S)
        if now_ns < end_ns:
            return None
        if self.rules.slots is None:
            return end_ns
        return now_ns if len(self._slots_done) >= self.rules.slots else None

    def next_request(self, slot: int | None = None) -> tuple[Prompt, bytes] | None:
        """What a free user sends next; None once the load is over, which the last request makes it.

        A user who began a session gets the turns of that one first.
        """
        self.tick()
        if self.is_over:
            return None
        if self.rules.requests is not None and self.measured >= self.rules.requests:
            self.stop("requests")
            return None
        turns = self._sessions.get(slot) if slot is not None else None
        made = turns.popleft() if turns else next(self.feed, None)
        if made is None:
            self.stop("end_of_trace")
            return None
        if slot is not None and made[0].turns_left and not turns:
            self._sessions[slot] = deque(itertools.islice(self.feed, made[0].turns_left))
        self.measured += self.measure_ns is not None and self.clock_ns() >= self.measure_ns
        return made

    def next_session(self) -> list[tuple[Prompt, bytes]] | None:
        """A request with the turns that follow it in its session; None once the load is over."""
        made = self.next_request()
        return None if made is None else [made, *itertools.islice(self.feed, made[0].turns_left)]

    def send(self, prompt: Prompt, body: bytes, times: Times, slot: int | None = None) -> Status:
        """Make one request and record it. `Cut` passes through once it is recorded."""
        exchange = Exchange()
        if self.conversations is not None:
            exchange.answer.pieces = []
            prompt, body = self.conversations.completed(prompt, body)
        # The start that decides is the scheduled one in an open loop, the real one in a closed loop.
        phase = self.phase_at(times.intended_ns if self.rules.slots is None else times.dispatch_ns)
        self._running[id(exchange)] = exchange
        live = self.recorder.live
        live.sent += 1
        request_id = self._id_of(str(live.sent))
        self.clipped.add(prompt)
        try:
            self.client.run(body, exchange)
        except Exception as error:
            exchange.status, exchange.error_type = Status.CLIENT_ERROR, f"client/{type(error).__name__}: {error}"
            self.client_errors.append(str(exchange.error_type))
        finally:
            del self._running[id(exchange)]
            self._note(exchange)
            record = make_record(self.run_id, request_id, self.start_ns, phase, prompt, times, exchange, self.worker)
            self._store(record)
        if self.conversations is not None:
            self.conversations.note(prompt, exchange.answer, is_ok=exchange.status == Status.OK)
        if slot is not None:
            self._slots_done.add(slot)
        return exchange.status

    def skip(self, prompt: Prompt, times: Times, cut: Cut) -> None:
        """Record a request that never left the in-flight limit."""
        exchange = Exchange(status=cut.status, error_type="connect/limit", end_ns=self.clock_ns())
        request_id = self._id_of(f"w{self.recorder.live.failed}-{prompt.prompt_id}")
        phase = self.phase_at(times.intended_ns)
        self._store(make_record(self.run_id, request_id, self.start_ns, phase, prompt, times, exchange, self.worker))

    def _id_of(self, name: str) -> str:
        """Unique in the run, whichever worker made it."""
        return f"{self.run_id}-{self.worker}-{name}" if self.worker else f"{self.run_id}-{name}"

    def _note(self, exchange: Exchange) -> None:
        self.last_end_ns = exchange.end_ns
        if exchange.sent_ns is not None:
            self.last_sent_ns = max(self.last_sent_ns or 0, exchange.sent_ns)
        self._count_error(exchange.status)
        if exchange.status != Status.CONNECT_ERROR:
            self._connect_errors = 0
            return
        self._connect_errors += 1
        if self._connect_errors >= MAX_CONNECT_ERRORS_IN_A_ROW:
            self.stop("server_unreachable")

    def _count_error(self, status: Status) -> None:
        if status in OWN_ENDS:
            return
        is_error = status != Status.OK
        self._errors += is_error
        self._recent_errors.append(is_error)
        rules = self.rules
        if rules.max_errors is not None and self._errors >= rules.max_errors:
            self.stop("error_count")
        is_full = len(self._recent_errors) == ERROR_WINDOW
        share = sum(self._recent_errors) / ERROR_WINDOW
        if rules.max_error_share is not None and is_full and share > rules.max_error_share:
            self.stop("error_share")

    def _store(self, record: RequestRecord) -> None:
        try:
            self.recorder.add(record)
        except OSError as error:
            self.write_errors += 1
            self.client_errors.append(f"records cannot be written: {error.strerror}")
            self.stop("no_space" if error.errno == errno.ENOSPC else "records_lost")
