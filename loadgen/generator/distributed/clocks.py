"""Clock offsets between processes, measured by pings as in NTP (RFC 5905, section 8).

Each clock is `time.perf_counter_ns` of a process.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TIME_NAMESPACE = Path("/proc/self/ns/time")


@dataclass(frozen=True, slots=True)
class Ping:
    """One ping: sent and received on our clock, answered on theirs. All ns."""

    sent_ns: int
    answered_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        return self.received_ns - self.sent_ns

    @property
    def offset_ns(self) -> int:
        """Their clock minus ours, if both directions took equally long."""
        return self.answered_ns - (self.sent_ns + self.received_ns) // 2


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Their clock minus ours, and the largest possible error. Both ns."""

    offset_ns: int
    uncertainty_ns: int


SAME_CLOCK = ClockOffset(0, 0)


def estimate(pings: Sequence[Ping]) -> ClockOffset:
    """The offset from the fastest ping: its error is at most half the round trip.

    >>> estimate([Ping(100, 1_160, 200), Ping(300, 1_330, 320)])
    ClockOffset(offset_ns=1020, uncertainty_ns=10)
    """
    best = min(pings, key=lambda ping: ping.round_trip_ns)
    return ClockOffset(best.offset_ns, -(-best.round_trip_ns // 2))


def error_ns(before: ClockOffset, after: ClockOffset | None) -> int:
    """The largest error of times corrected by `before`, at the end of the run: uncertainty plus drift."""
    if after is None:
        return before.uncertainty_ns
    return max(before.uncertainty_ns, after.uncertainty_ns) + abs(after.offset_ns - before.offset_ns)


def clock_id() -> str | None:
    """Equal for processes with one monotonic clock (same boot, same time namespace). None: unknown."""
    with contextlib.suppress(OSError):
        return f"{BOOT_ID.read_text().strip()}/{os.readlink(TIME_NAMESPACE)}"  # noqa: PTH115 - not a path
    return None
