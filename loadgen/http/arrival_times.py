"""Arrival times of received bytes: from the kernel where it records them (Linux), otherwise the time of the read.

Linux timestamps each segment when it arrives (SO_TIMESTAMPING; Documentation/networking/timestamping.rst), so a client
that reads late still has the arrival time. Data of several segments in one read has the timestamp of the last. The
kernel merges small segments that wait unread (seen on Linux 6.18), so smaller reads do not separate them: for a
generator that is stopped for longer than a gap, the events before the last one have only a bound.
"""

import functools
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Linux constants that the socket module does not have: asm-generic/socket.h and linux/net_tstamp.h.
SO_TIMESTAMPING = 37
RX_SOFTWARE, SOFTWARE = 1 << 3, 1 << 4
# struct scm_timestamping: three timespecs, of which the first is the software timestamp.
TIMESTAMPS = struct.Struct("@qq32x")
unpack_timestamp = TIMESTAMPS.unpack
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESTAMPS.size)
NS_PER_S = 1_000_000_000
MAX_AGE_NS = 10 * NS_PER_S
# The clocks differ by a constant between two steps of the wall clock. A larger change is measured again.
TOLERANCE_NS = 50_000
STEP_NS = 2_000_000
COUNTS = ("stamped", "unstamped", "rejected")
FULL = "full"
# Times count as the kernel's if more than this fraction of the reads have a valid timestamp.
MIN_STAMPED = 0.99

Clock = Callable[[], int]
Recvmsg = Callable[[int, int], tuple[bytes, list[tuple[int, int, bytes]], int, Any]]


class ArrivalTimes:
    """Reads sockets with arrival times, in ns of `clock_ns`; `wall_ns` is the clock of the kernel's timestamps.

    Four counts of reads:
    `stamped`: the read has a kernel timestamp.
    `unstamped`: the read has none.
    `rejected`: the timestamp lies in the future, is older than `MAX_AGE_NS`, or precedes a step of the wall clock.
    `full`: the read filled its buffer. More data was waiting, so flow control may have slowed the server.
    """

    def __init__(self, clock_ns: Clock, wall_ns: Clock = time.time_ns) -> None:
        self.clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._offset_ns = self._measure_offset()
        self._trusted_from_ns = 0
        self.stamped = self.unstamped = self.rejected = self.full = 0
        _switch_on()

    def enable(self, sock: socket.socket) -> bool:
        """Request timestamps for a connection. Returns whether the system has them."""
        return _request_timestamps(sock)

    def receive(self, recvmsg: Recvmsg, size: int) -> tuple[bytes, int, int]:
        """Read up to `size` bytes. Returns the data, when it arrived, and how much later it was read (ns)."""
        data, ancillary, _, _ = recvmsg(size, ANCILLARY_BYTES)
        now_ns = self.clock_ns()
        if len(data) == size:
            self.full += 1
        try:
            seconds, ns = unpack_timestamp(ancillary[0][2])
        except (IndexError, struct.error):
            self.unstamped += bool(data)
            return data, now_ns, 0
        offset_ns = self._wall_ns() - now_ns
        if not -TOLERANCE_NS < offset_ns - self._offset_ns < TOLERANCE_NS:
            self._check_step()
        at_ns = seconds * NS_PER_S + ns - self._offset_ns
        late_ns = now_ns - at_ns
        if late_ns < 0 or late_ns > MAX_AGE_NS or at_ns < self._trusted_from_ns:
            self.rejected += 1
            return data, now_ns, 0
        self.stamped += 1
        return data, at_ns, late_ns

    def to_json(self) -> dict[str, Any]:
        """The source of the times, and the counts of reads."""
        counts = {"stamped": self.stamped, "unstamped": self.unstamped, "rejected": self.rejected}
        return {**_with_source(counts), FULL: self.full}

    def _check_step(self) -> None:
        """Measure the offset again. After a step, timestamps from before it cannot be converted: they are rejected."""
        offset_ns = self._measure_offset()
        if abs(offset_ns - self._offset_ns) >= STEP_NS:
            self._trusted_from_ns = self.clock_ns()
        self._offset_ns = offset_ns

    def _measure_offset(self) -> int:
        """Wall clock minus `clock_ns`, from the narrowest of five readings: a process can be preempted in between."""
        readings = []
        for _ in range(5):
            before_ns, wall_ns, after_ns = self.clock_ns(), self._wall_ns(), self.clock_ns()
            readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
        return min(readings)[1]


def _request_timestamps(sock: socket.socket) -> bool:
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RX_SOFTWARE | SOFTWARE)
    except OSError:
        return False
    return True


@functools.cache
def _switch_on() -> int:
    """Switch timestamps on before the first connection, which would otherwise lack them for some milliseconds.

    Linux timestamps segments while any socket of the machine has the option set. Returns the descriptor of one that
    stays open.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    _request_timestamps(sock)
    return sock.detach()


def total_arrival_times(workers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The source and the counts of all workers, from their health; empty if none reports them."""
    counted = [worker["arrival_times"] for worker in workers if worker.get("arrival_times")]
    if not counted:
        return {}
    counts = {name: sum(int(each[name]) for each in counted) for name in COUNTS}
    return {**_with_source(counts), FULL: sum(int(each.get(FULL, 0)) for each in counted)}


def _with_source(counts: dict[str, int]) -> dict[str, Any]:
    """The counts and their source: kernel, read, or mixed if 1 % of the reads have no valid timestamp."""
    if not counts["stamped"]:
        return {"source": "read", **counts}
    return {"source": "kernel" if counts["stamped"] > MIN_STAMPED * sum(counts.values()) else "mixed", **counts}
