"""Timers on gevent's loop with microsecond resolution, where the system has timer file descriptors.

The loop's own timers are rounded up to epoll's milliseconds, which would count as lag of the loop. A timer file
descriptor is as late as a socket would be. Imports gevent, so only the worker may import it.
"""

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import gevent

NS_PER_S = 1_000_000_000
READABLE = 1
CLOCK_MONOTONIC = 1
TFD_TIMER_ABSTIME = 1

_LIBRARY = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))

    @classmethod
    def of(cls, ns: int) -> "_Timespec":
        return cls(*divmod(ns, NS_PER_S))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class Ticker:
    """Calls `on_tick` on the loop every `interval_s`, with its lateness in seconds."""

    def __init__(self, interval_s: float, on_tick: Callable[[float], None]) -> None:
        self._interval_ns = round(interval_s * NS_PER_S)
        self._on_tick = on_tick
        self._due_ns = time.perf_counter_ns() + self._interval_ns
        self._fd = _open_timer(self._due_ns, self._interval_ns)
        loop = gevent.get_hub().loop
        self._watcher: Any
        if self._fd is not None:
            self._watcher = loop.io(self._fd, READABLE)
        else:
            self._watcher = loop.timer(interval_s, interval_s)
        self._watcher.start(self._tick)

    def _tick(self) -> None:
        now_ns = time.perf_counter_ns()
        late_ns = now_ns - self._due_ns
        if self._fd is not None:
            os.read(self._fd, 8)
        self._due_ns += self._interval_ns * (1 + max(0, late_ns) // self._interval_ns)
        self._on_tick(late_ns / NS_PER_S)

    def close(self) -> None:
        self._watcher.stop()
        self._watcher.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Alarm:
    """Wakes one greenlet at a time of `time.perf_counter_ns`. Not for concurrent use."""

    def __init__(self) -> None:
        self._fd = _open_timer(0, 0)
        self._watcher: Any = None if self._fd is None else gevent.get_hub().loop.io(self._fd, READABLE)

    def sleep_until(self, at_ns: int) -> None:
        left_ns = at_ns - time.perf_counter_ns()
        if left_ns <= 0:
            gevent.sleep(0)
        elif self._fd is None:
            gevent.sleep(left_ns / NS_PER_S)
        else:
            _set_timer(self._fd, at_ns, 0)
            gevent.get_hub().wait(self._watcher)
            os.read(self._fd, 8)


def _open_timer(first_ns: int, interval_ns: int) -> int | None:
    """A timer descriptor on the clock of `time.perf_counter_ns`; None if the system has none."""
    if not hasattr(_LIBRARY, "timerfd_create"):
        return None
    fd = int(_LIBRARY.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        return None
    _set_timer(fd, first_ns, interval_ns)
    return fd


def _set_timer(fd: int, first_ns: int, interval_ns: int) -> None:
    """Fire at `first_ns` (0: never), then every `interval_ns` (0: once)."""
    spec = _Itimerspec(_Timespec.of(interval_ns), _Timespec.of(first_ns))
    if _LIBRARY.timerfd_settime(fd, TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
        raise OSError(ctypes.get_errno(), "timerfd_settime")
