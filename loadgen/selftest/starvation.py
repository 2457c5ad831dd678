"""Takes half of the processor time from the load generator: its processes are stopped and continued in turns."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadgen.target.machine import request_realtime

TURN_S = 0.005
GENERATOR = b"loadgen.generator."


@dataclass(slots=True)
class Stops:
    """The longest stop so far. A busy machine that does not permit real-time scheduling makes stops longer."""

    longest_s: float = 0.0


@contextlib.contextmanager
def starved_generator() -> Iterator[Stops]:
    """Stop every load process that this process starts for half of the time, in turns of `TURN_S`."""
    is_over, stops = threading.Event(), Stops()
    thread = threading.Thread(target=_take_turns, args=(os.getpid(), is_over, stops))
    thread.start()
    try:
        yield stops
    finally:
        is_over.set()
        thread.join()


def _take_turns(parent_pid: int, is_over: threading.Event, stops: Stops) -> None:
    """Runs before the generator and the server, which have real-time scheduling too: a late turn starves for longer."""
    request_realtime(before_others=True)
    while not is_over.wait(TURN_S):
        processes = load_processes(parent_pid)
        began_s = time.monotonic()
        _signal(processes, signal.SIGSTOP)
        is_over.wait(TURN_S)
        _signal(processes, signal.SIGCONT)
        if processes:
            stops.longest_s = max(stops.longest_s, time.monotonic() - began_s)


def load_processes(parent_pid: int) -> list[int]:
    """The load processes that a process started; none on systems without /proc."""
    found = []
    for path in Path(f"/proc/{parent_pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            words = path.read_text().split()
            found += [int(word) for word in words if GENERATOR in Path(f"/proc/{word}/cmdline").read_bytes()]
    return found


def _signal(processes: list[int], number: signal.Signals) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
