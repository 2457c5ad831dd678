"""The line that shows a run in progress: its place in a series, a bar, percent, time left, load and latencies.

Pure: the display passes the numbers of a message and the width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_COLUMNS, LEAST_BAR, MOST_BAR = 80, 6, 24
LAUNCHING = "the server starts or stops"
"""The idle text of a series that launches a server for each run."""
FULL, EMPTY = "━", "┄"
LATE_S = 1.0


@dataclass(frozen=True, slots=True)
class RunLength:
    """The expected length of a run: a time, or a number of measured requests; neither is known for some loads.

    can_extend: the run goes on after the time until it has the requests it needs.
    """

    warmup_s: float = 0.0
    duration_s: float | None = None
    requests: int | None = None
    can_extend: bool = False

    def is_extended(self, message: Mapping[str, Any]) -> bool:
        """Whether the run goes on after its planned time, for an unknown time, as after a warm-up that took longer."""
        if message["phase"] == "drain" or self.left_s(message) != 0.0:
            return False
        return self.can_extend or (self.duration_s is not None and message["t_s"] > self._end_s(message) + LATE_S)

    def share(self, message: Mapping[str, Any]) -> float | None:
        """The part of the run that is done, up to 1. `completed_measured` counts requests after the warm-up."""
        if message["phase"] == "drain":
            return 1.0
        if self.duration_s is not None:
            return min(1.0, float(message["t_s"]) / self._end_s(message))
        if self.requests:
            return min(1.0, float(message.get("completed_measured", message["completed"])) / self.requests)
        return None

    def left_s(self, message: Mapping[str, Any]) -> float | None:
        """The time left, from the duration or from the pace so far."""
        share = self.share(message)
        if self.duration_s is not None:
            return max(0.0, self._end_s(message) - float(message["t_s"]))
        return float(message["t_s"]) * (1 - share) / share if share else None

    def _end_s(self, message: Mapping[str, Any]) -> float:
        """The earliest end of a run with a duration: the warm-up can last longer than planned."""
        warmup_s = max(self.warmup_s, float(message["t_s"])) if message["phase"] == "warmup" else self.warmup_s
        return warmup_s + (self.duration_s or 0.0)


@dataclass(frozen=True, slots=True)
class Position:
    """The place of a run in a series: `point 2 of 5`, `launch 7 of 15, best so far +12 %`.

    idle: shown while no run sends numbers, with the time since the numbers of the last run.
    """

    name: str
    number: int
    count: int | str | None = None
    note: str = ""
    idle: str = "between loads"

    def __str__(self) -> str:
        of = f" of {self.count}" if self.count is not None else ""
        return f"{self.name} {self.number}{of}" + (f", {self.note}" if self.note else "")


def terminal_line(
    message: Mapping[str, Any], tokens_per_s: float | None, length: RunLength, place: str, columns: int
) -> str:
    """One line that fits: the least important numbers are left out first, and the bar takes the columns left.

    >>> message = {"t_s": 33, "phase": "measure", "in_flight": 8, "completed": 30, "failed": 0, "ttft_p95_s": 0.02}
    >>> terminal_line(message, 512.3, RunLength(3, 60), "point 2 of 5", 80)
    'point 2 of 5 ━━━━━━┄┄┄┄┄  52 % ETA 0:30  8 running  512 tokens/s  TTFT p95 20 ms'
    """
    columns = min(columns, MOST_COLUMNS)
    share = length.share(message)
    head = f"{place} " if place else ""
    percent = "" if share is None else _progress(length, message, share)
    tail = ""
    for part in _parts(message, tokens_per_s, share is None):
        if len(head) + len(percent) + len(tail) + len(part) + (LEAST_BAR if percent else 0) <= columns:
            tail += part
    bar = min(MOST_BAR, columns - len(head) - len(percent) - len(tail)) if share is not None else 0
    full = round(bar * (share or 0.0))
    return (head + FULL * full + EMPTY * (bar - full) + percent + tail).strip()[:columns]


def plain_line(message: Mapping[str, Any], tokens_per_s: float | None, length: RunLength, place: str) -> str:
    """One line of a log: every number, without a bar.

    >>> message = {"t_s": 33, "phase": "measure", "in_flight": 8, "completed": 30, "failed": 0, "ttft_p50_s": 0.0123,
    ...            "ttft_p95_s": 0.02}
    >>> plain_line(message, 512.3, RunLength(3, 60), "point 2 of 5")
    'point 2 of 5: 33 s measure, 52 %, 0:30 left, 8 running, 30 done, 0 failed, 512 tokens/s, TTFT p50 12 ms p95 20 ms'
    """
    share, left_s = length.share(message), length.left_s(message)
    parts = [
        f"{message['t_s']:.0f} s {message['phase']}",
        *([f"{100 * share:.0f} %"] if share is not None and message["phase"] != "drain" else []),
        *([_left(length, message, left_s)] if left_s is not None and message["phase"] != "drain" else []),
        f"{message['in_flight']:,} running",
        f"{message['completed']:,} done",
        f"{message['failed']:,} failed",
        f"{tokens_per_s or 0:,.0f} tokens/s",
    ]
    if message.get("ttft_p95_s") is not None:
        parts.append(f"TTFT p50 {_ms(message['ttft_p50_s'])} p95 {_ms(message['ttft_p95_s'])}")
    if message.get("waiting"):
        parts.append(f"{message['waiting']:,} waiting at the in-flight limit")
    return f"{place}: {', '.join(parts)}" if place else ", ".join(parts)


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any.

    >>> clock(90.4), clock(3725)
    ('1:30', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _left(length: RunLength, message: Mapping[str, Any], left_s: float) -> str:
    return "extended" if length.is_extended(message) else f"{clock(left_s)} left"


def _progress(length: RunLength, message: Mapping[str, Any], share: float) -> str:
    """The share and the time left; an extension and the drain by name, because they end at no known time."""
    if message["phase"] == "drain":
        return " draining"
    left_s = length.left_s(message)
    eta = f" ETA {clock(left_s)}" if left_s is not None else ""
    return f" {100 * share:3.0f} %" + (" extended" if length.is_extended(message) else eta)


def _parts(message: Mapping[str, Any], tokens_per_s: float | None, is_unbounded: bool) -> list[str]:
    """The numbers after the bar, the most important first."""
    parts = [f"{message['t_s']:.0f} s"] if is_unbounded else []
    if message["failed"]:
        parts.append(f"  {message['failed']:,} failed")
    parts += ["  warm-up" if message["phase"] == "warmup" else f"  {message['in_flight']:,} running"]
    parts.append(f"  {tokens_per_s or 0:,.0f} tokens/s")
    if message.get("ttft_p95_s") is not None:
        parts.append(f"  TTFT p95 {_ms(message['ttft_p95_s'])}")
    if message.get("waiting"):
        parts.append(f"  {message['waiting']:,} waiting")
    return parts


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.1f} ms" if value < 10 else f"{value:,.0f} ms"
