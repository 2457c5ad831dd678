"""The workers of a run in the master: their states, and decisions for the run. Pure: no sockets, clock or locust."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from loadgen.generator.distributed.clocks import SAME_CLOCK, ClockOffset, error_ns
from loadgen.generator.distributed.start_count import StartCount
from loadgen.generator.recorder import RECENT_TTFTS, quantile
from loadgen.generator.worker_messages import Hello

COUNTS = ("in_flight", "sent", "completed", "completed_measured", "failed", "tokens_out", "waiting")


class Stage(StrEnum):
    PREPARING = "preparing"
    READY = "ready"
    DONE = "done"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """One worker. `end` and `health` are from its done message; `warm_ns` is on the master's clock.

    `left` is the number of its window's requests that have not ended; None before its window has ended.
    """

    index: int
    client_id: str
    hello: Hello
    stage: Stage = Stage.PREPARING
    warm_ns: int | None = None
    left: int | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    measured: ClockOffset = SAME_CLOCK
    measured_later: ClockOffset | None = None
    shares_clock: bool = False
    lost_because: str | None = None

    @property
    def is_active(self) -> bool:
        return self.stage in (Stage.PREPARING, Stage.READY)

    @property
    def offset_ns(self) -> int:
        """Its clock minus the master's: 0 if both read one clock, else measured by pings."""
        return 0 if self.shares_clock else self.measured.offset_ns

    @property
    def clock_error_ns(self) -> int:
        return 0 if self.shares_clock else error_ns(self.measured, self.measured_later)

    def describe(self, count: int) -> dict[str, Any]:
        """Its entry under `workers` in client.json."""
        return {
            **self.health,
            "worker": self.index,
            "host": self.hello.host,
            "pid": self.hello.pid,
            "is_lost": self.stage == Stage.LOST,
            "lost_because": self.lost_because,
            "share": 1 / count,
            "clock_offset_s": self.offset_ns / 1e9,
            "clock_error_s": self.clock_error_ns / 1e9,
            "clock_measured_s": self.measured.offset_ns / 1e9,
            "clock_measured_error_s": error_ns(self.measured, self.measured_later) / 1e9,
        }


class WorkerGroup:
    """The workers of one run. `window_end` is the reason and the moment if the master ends the window of all of them.

    `is_stopped`: all of them send nothing more; `stop_reason` is why, if it was before their windows ended. Of a closed
    loop with a fixed number of `requests`, the master counts the starts.
    """

    def __init__(self, count: int, master: Hello, max_errors: int | None = None, requests: int | None = None) -> None:
        self.count = count
        self.stop_reason: str | None = None
        self.is_stopped = False
        self.window_end: tuple[str, int] | None = None
        self._starts = None if requests is None else StartCount(requests)
        self.has_begun = False
        self._master = master
        self._max_errors = max_errors
        self._members: dict[str, Member] = {}
        self._ttfts_s: deque[float] = deque(maxlen=RECENT_TTFTS)
        self._tpots_s: deque[float] = deque(maxlen=RECENT_TTFTS)
        self._last_end = "worker_lost"

    @property
    def members(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda member: member.index)

    def member(self, client_id: str) -> Member | None:
        return self._members.get(client_id)

    def refusal(self, hello: Hello | None, url_is_loopback: bool) -> str | None:
        """Why a worker is refused; None if it is accepted."""
        if hello is None:
            return "unrecognised handshake"
        if problem := self._master.mismatch(hello):
            return problem
        if self.has_begun or len(self._members) >= self.count:
            return f"the load already has its {self.count} workers"
        taken = {member.index for member in self._members.values()}
        if hello.index is not None and (hello.index >= self.count or hello.index in taken):
            return f"part {hello.index} of the load is not free"
        if url_is_loopback and hello.host != self._master.host:
            return (
                "the server's address is on the master's loopback interface; use a --url that other machines can reach"
            )
        return None

    def admit(self, client_id: str, hello: Hello) -> Member:
        """Assign a partition: the one that the master started it for, else the next."""
        index = hello.index if hello.index is not None else len(self._members)
        shares_clock = hello.clock is not None and hello.clock == self._master.clock
        member = Member(index, client_id, hello, shares_clock=shares_clock)
        self._members[client_id] = member
        return member

    @property
    def is_ready(self) -> bool:
        return len(self._members) == self.count and all(m.stage == Stage.READY for m in self._members.values())

    @property
    def active(self) -> list[Member]:
        return [member for member in self.members if member.is_active]

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over in every remaining worker."""
        return bool(self.active) and all(member.warm_ns is not None for member in self.active)

    @property
    def warm_ns(self) -> int:
        """When it was over in the last of them, on the master's clock."""
        return max(member.warm_ns or 0 for member in self.active)

    @property
    def is_over(self) -> bool:
        return not self.active

    def lose(self, member: Member, because: str) -> None:
        """Mark a worker as lost; its records so far are kept."""
        if member.is_active:
            member.stage = Stage.LOST
            member.lost_because = because
            member.progress |= {"in_flight": 0, "waiting": 0} if member.progress else {}

    def note_progress(self, member: Member, message: Mapping[str, Any]) -> None:
        member.progress = dict(message)
        self._ttfts_s.extend(message.get("ttfts_s") or ())
        self._tpots_s.extend(message.get("tpots_s") or ())
        errors = sum(int(each.progress.get("errors") or 0) for each in self.members)
        if self._max_errors is not None and errors >= self._max_errors:
            self.stop("error_count")

    def note_starts(self, member: Member, starts_ns: Sequence[int], until_ns: int, from_ns: int | None) -> None:
        """Requests started, by the worker's clock; the last of the fixed number ends the window.

        `from_ns` is the end of the warm-up, by the master's clock; None while it lasts.
        """
        if self._starts is None:
            return
        self._starts.add(member.index, [at - member.offset_ns for at in starts_ns], until_ns - member.offset_ns)
        if from_ns is not None:
            end_ns = self._starts.end_ns([each.index for each in self.active], from_ns)
            if end_ns is not None:
                self.end_window("requests", end_ns + 1)

    def end_window(self, reason: str, at_ns: int) -> None:
        """End the window of every worker; the first end stays."""
        self.window_end = self.window_end or (reason, at_ns)

    @property
    def is_draining(self) -> bool:
        """Whether the window has ended in every remaining worker."""
        return bool(self.active) and all(member.left is not None for member in self.active)

    @property
    def left(self) -> int:
        """Requests of the window that have not ended."""
        return sum(member.left or 0 for member in self.active)

    def note_stopping(self, reason: str) -> None:
        """A worker stopped sending: stop all workers, unless it was interrupted alone."""
        if reason != "interrupted":
            self.stop(reason)

    def note_done(self, member: Member, end: Mapping[str, Any], health: Mapping[str, Any]) -> None:
        member.end, member.health = dict(end), dict(health)
        if end["stop_reason"] == "interrupted" and not self.is_stopped:
            self.lose(member, "its process was interrupted")
            return
        member.stage = Stage.DONE
        self._last_end = str(end["stop_reason"])

    def stop(self, reason: str) -> None:
        """Send nothing more. A stop in the drain is no reason for the end of the window."""
        self.is_stopped = True
        if not self.is_draining:
            self.stop_reason = self.stop_reason or reason

    def live(self, t_s: float) -> dict[str, Any]:
        """The progress of all workers in one message."""
        latest = [member.progress for member in self.members if member.progress]
        phases = [str(each["phase"]) for each in latest]
        statuses: Counter[str] = Counter()
        for each in latest:
            statuses.update(each.get("statuses") or {})
        return {
            "t_s": t_s,
            "phase": max(phases, key=phases.count, default="warmup"),
            "statuses": dict(statuses),
            **{name: sum(int(each.get(name) or 0) for each in latest) for name in COUNTS},
            **_spread("ttft", self._ttfts_s),
            **_spread("tpot", self._tpots_s),
        }

    def end(self) -> dict[str, Any]:
        """How the load ended: the latest end of its workers, and the sums of their counts."""
        ends = [member.end for member in self.members if member.end]
        lost = [member for member in self.members if member.stage == Stage.LOST]
        clipped: Counter[str] = Counter()
        for end in ends:
            clipped.update(end["clipped"])
        return {
            "stop_reason": self.stop_reason or self._last_end,
            **{name: _latest(end[name] for end in ends) for name in ("warmup_ended_s", "window_end_s", "drain_s")},
            "clipped": dict(clipped),
            "client_errors": [error for end in ends for error in end["client_errors"]][:20],
            "lost": [
                {"worker": member.index, "share": 1 / self.count, "because": member.lost_because} for member in lost
            ],
            "clock_error_s": max((member.clock_error_ns for member in self.members), default=0) / 1e9,
            "clock_offset_s": max((abs(member.offset_ns) for member in self.members), default=0) / 1e9,
        }


def _spread(name: str, values_s: "deque[float]") -> dict[str, float | None]:
    return {f"{name}_p50_s": quantile(values_s, 0.50), f"{name}_p95_s": quantile(values_s, 0.95)}


def _latest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
