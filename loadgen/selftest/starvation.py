"""Takes half of the processor time from the load generator: its processes are stopped and continued in turns."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

TURN_S = 0.005
GENERATOR = b"loadgen.generator."


@contextlib.contextmanager
def starved_generator() -> Iterator[None]:
    """Stop every load process that this process starts for half of the time, in turns of `TURN_S`."""
    is_over = threading.Event()
    thread = threading.Thread(target=_take_turns, args=(os.getpid(), is_over))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _take_turns(parent_pid: int, is_over: threading.Event) -> None:
    while not is_over.wait(TURN_S):
        processes = load_processes(parent_pid)
        _signal(processes, signal.SIGSTOP)
        is_over.wait(TURN_S)
        _signal(processes, signal.SIGCONT)


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
