"""The phases of a load: warm-up, window and drain. Pure: every time is an argument, in monotonic ns.

The load goes on through the drain, until no request of the window is left, so that the last of them meet the same load
as the first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from reports.run_schema import Phase

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """When the warm-up and the window end. `requests` and `duration_s` count from the end of the warm-up.

    A warm-up lasts until `slots` users of a closed loop have each completed a request. `rows` is the number of requests
    of a trace. `last_ns` is the last arrival of an open loop, since its start, if a number of requests ends its window,
    and `last_reason` the reason then. `max_error_share` is a fraction of the last requests.
    """

    warmup_s: float
    duration_s: float | None
    requests: int | None = None
    slots: int | None = None
    rows: int | None = None
    last_ns: int | None = None
    last_reason: str = "requests"
    max_errors: int | None = None
    max_error_share: float | None = None


@dataclass(slots=True)
class LoadWindow:
    """The phases of one worker's load, and its requests that have not ended.

    The window is [`measure_ns`, `end_ns`); `reason` is why it ended, and the first reason stays. `on_warm` is for one
    worker of several: it is called once when the warm-up is over in this worker, and `measure_from` when it is over in
    all workers. `starts` collects the start of every request for a master that counts them. `next_due_ns` is the
    arrival that an open loop waits for.
    """

    limits: LoadEnd
    on_warm: Callable[[int], None] | None = None
    starts: list[int] | None = None
    start_ns: int = 0
    measure_ns: int | None = None
    end_ns: int | None = None
    reason: str | None = None
    next_due_ns: int | None = None
    _is_warm: bool = False
    _num_started: int = 0
    _num_measured: int = 0
    _slots_done: set[int] = field(default_factory=set)
    _open: dict[int, int] = field(default_factory=dict)

    def start(self, at_ns: int) -> None:
        """Set time zero of the run; only the first call counts."""
        if not self.start_ns:
            self.start_ns = at_ns
            if self.limits.warmup_s == 0:
                self.measure_ns = at_ns

    def measure_from(self, at_ns: int) -> None:
        """Start the measurement: the warm-up is over in every worker."""
        if self.measure_ns is None:
            self.measure_ns = at_ns

    def end(self, reason: str, at_ns: int) -> None:
        """End the window before `at_ns`; the load goes on."""
        if self.reason is None:
            self.reason, self.end_ns = reason, at_ns

    def contains(self, at_ns: int) -> bool:
        """Whether a request that starts at this moment is measured."""
        return self.phase_at(at_ns) == Phase.MEASURE

    def phase_at(self, at_ns: int) -> Phase:
        if self.end_ns is not None and at_ns >= self.end_ns:
            return Phase.DRAIN
        return Phase.WARMUP if self.measure_ns is None or at_ns < self.measure_ns else Phase.MEASURE

    def tick(self, now_ns: int) -> None:
        """Move from warm-up to window to drain, as time passes."""
        if self.measure_ns is None and not self._is_warm:
            self._end_warmup(self._warm_since(now_ns))
        last_ns, duration_s = self.limits.last_ns, self.limits.duration_s
        if last_ns is not None and now_ns >= self.start_ns + last_ns:
            self.end(self.limits.last_reason, self.start_ns + last_ns + 1)
        if duration_s is not None and self.measure_ns is not None:
            end_ns = self.measure_ns + round(duration_s * NS_PER_S)
            if now_ns >= end_ns:
                self.end("duration", end_ns)

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

    def expect(self, key: int, start_ns: int) -> None:
        """A request has a start time and has not ended; `key` identifies it."""
        self._open[key] = start_ns

    def begin(self, key: int, start_ns: int) -> None:
        """A request of a closed loop starts; the last of a fixed number ends the window."""
        self.expect(key, start_ns)
        if self.starts is not None:
            self.starts.append(start_ns)
        self._num_started += 1
        self._num_measured += self.contains(start_ns)
        if self._num_measured == self.limits.requests:
            self.end("requests", start_ns + 1)
        if self._num_started == self.limits.rows:
            self.end("end_of_trace", start_ns + 1)

    def forget(self, key: int, slot: int | None = None) -> None:
        """A request has ended. `slot` is its user, in a closed loop."""
        self._open.pop(key, None)
        if slot is not None:
            self._slots_done.add(slot)

    def take_starts(self) -> list[int]:
        """The starts since the last call."""
        starts, self.starts = self.starts or [], []
        return starts

    @property
    def left(self) -> int:
        """Requests of the window that have not ended: in flight, waiting, or still to be scheduled."""
        is_next_in = self.next_due_ns is not None and self.contains(self.next_due_ns)
        return sum(map(self.contains, self._open.values())) + is_next_in
