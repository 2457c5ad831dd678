"""The load generator's own health: event-loop lag, CPU, memory, garbage collection, open files."""

import gc
import os
import resource
import time
from array import array
from pathlib import Path
from typing import Any

TIMER_S = 0.010
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SelfMonitor:
    """Measures this process. A timer with an interval of `TIMER_S` calls `note_timer`."""

    def __init__(self) -> None:
        self._lags_s: array[float] = array("d")
        self._second_max_s = 0.0
        self._cpu_s = time.process_time()
        self._wall_s = time.perf_counter()
        self._begin_cpu_s, self._begin_wall_s = self._cpu_s, self._wall_s
        self._cpu_share_max = 0.0
        self._gc_started_s = 0.0
        self._gc_pauses_s: array[float] = array("d")
        gc.callbacks.append(self._on_gc)

    def note_timer(self, late_s: float) -> None:
        self._lags_s.append(max(0.0, late_s))
        self._second_max_s = max(self._second_max_s, late_s)

    def second(self) -> dict[str, Any]:
        """The last second; starts the next one."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        share = (cpu_s - self._cpu_s) / max(wall_s - self._wall_s, 1e-9)
        row = {"loop_lag_max_s": self._second_max_s, "cpu_share": share, "rss_bytes": rss_bytes()}
        self._cpu_share_max = max(self._cpu_share_max, share)
        self._cpu_s, self._wall_s, self._second_max_s = cpu_s, wall_s, 0.0
        return row

    def summary(self) -> dict[str, Any]:
        """Over the whole run."""
        lags = sorted(self._lags_s)
        wall_s = time.perf_counter() - self._begin_wall_s
        return {
            "loop_lag_p50_s": lags[len(lags) // 2] if lags else None,
            "loop_lag_p99_s": lags[min(len(lags) - 1, int(len(lags) * 0.99))] if lags else None,
            "loop_lag_max_s": lags[-1] if lags else None,
            "cpu_share": (time.process_time() - self._begin_cpu_s) / max(wall_s, 1e-9),
            "cpu_share_max": self._cpu_share_max,
            "gc_pause_max_s": max(self._gc_pauses_s, default=0.0),
            "gc_pause_total_s": sum(self._gc_pauses_s),
            "rss_bytes": rss_bytes(),
            "open_files": open_files(),
            "max_open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "local_ports": local_ports(),
        }

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_started_s = time.perf_counter()
        else:
            self._gc_pauses_s.append(time.perf_counter() - self._gc_started_s)


def rss_bytes() -> int | None:
    """Resident memory of this process, None without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def open_files() -> int | None:
    """Open file descriptors of this process, None without /proc."""
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone, no paths
    except OSError:
        return None


def local_ports() -> int | None:
    """The number of local ports for outgoing connections to one address, None without /proc."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(last) - int(first) + 1
    except (OSError, ValueError):
        return None
