"""A process that ends the launcher's child processes if the launcher is killed.

It reads a pipe, to which the launcher writes a line for each child process and each path to remove. If the pipe ends
without `done`, the launcher is gone: routers get SIGTERM and ten seconds, then all registered processes are killed with
their process groups, and the paths are removed. It is run by path and imports the standard library only, to start fast.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

DRAIN_S = 10.0


@dataclass
class Registry:
    """The registered processes, pid -> (start time, whether it may drain), and paths."""

    children: dict[int, tuple[str, bool]] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    done: bool = False

    def add(self, line: str) -> None:
        """Read a line: `child PID START drain|kill`, `ended PID`, `path PATH` or `done`."""
        match line.rstrip("\n").split(" ", 3):
            case ["child", pid, start, manner]:
                self.children[int(pid)] = (start, manner == "drain")
            case ["ended", pid]:
                self.children.pop(int(pid), None)
            case ["path", *words]:
                self.paths.append(Path(" ".join(words)))
            case ["done"]:
                self.done = True

    def end(self, drain_s: float = DRAIN_S) -> None:
        """Stop every registered process, unless its pid was reused, and remove the paths."""
        draining = [pid for pid, (start, drains) in self.children.items() if drains and start_time(pid) == start]
        for pid in draining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + drain_s
        while any(is_alive(pid, self.children[pid][0]) for pid in draining) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid, (start, _) in self.children.items():
            if start_time(pid) in (start, None):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        for path in self.paths:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)


def start_time(pid: int) -> str | None:
    """The start time of `pid` in ticks; `-` without /proc, None without such a process."""
    if not Path("/proc/self/stat").exists():
        return "-"
    fields = _stat(pid)
    return fields[19] if fields else None


def is_alive(pid: int, start: str) -> bool:
    """Whether `pid` is the process that started at `start`, and not a zombie."""
    if start_time(pid) != start:
        return False
    if start != "-":
        return _stat(pid)[:1] not in ([], ["Z"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command, the first one the state; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def watch(lines: Iterable[str]) -> None:
    """Read the launcher's lines until `done` or their end."""
    registry = Registry()
    for line in lines:
        registry.add(line)
    if not registry.done:
        registry.end()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.stdin)
