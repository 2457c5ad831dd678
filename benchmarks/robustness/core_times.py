"""The times that the threads of processes ran and waited for a core, from Linux's counters."""

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SAMPLE_S = 0.05


class CoreTimes(NamedTuple):
    """Of each process, the time that its threads have run so far, and that they have waited for a core (ns)."""

    at_ns: int
    ran_ns: dict[str, int]
    waited_ns: dict[str, int]


def core_times_within(
    samples: Sequence[CoreTimes], start_ns: int, end_ns: int
) -> tuple[dict[str, int], dict[str, int]]:
    """The times that each process ran and waited for a core, from the samples around a span of time."""
    first = max(0, bisect_right(samples, start_ns, key=lambda sample: sample.at_ns) - 1)
    last = min(len(samples) - 1, bisect_left(samples, end_ns, key=lambda sample: sample.at_ns))
    if last <= first:
        return {}, {}
    before, after = samples[first], samples[last]
    ran = {name: ns - before.ran_ns.get(name, 0) for name, ns in after.ran_ns.items()}
    waited = {name: ns - before.waited_ns.get(name, 0) for name, ns in after.waited_ns.items()}
    return ran, waited


@dataclass(slots=True)
class CoreSampler:
    """Samples each process every `SAMPLE_S`, in a thread. `pids`: process by name."""

    pids: dict[str, int]
    samples: list[CoreTimes] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "CoreSampler":
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            ran, waited = {}, {}
            for name, pid in self.pids.items():
                ran[name], waited[name] = core_times(pid)
            self.samples.append(CoreTimes(time.perf_counter_ns(), ran, waited))


def core_times(pid: int) -> tuple[int, int]:
    """Time that the threads of a process ran and that they waited for a core: /proc/PID/task/TID/schedstat."""
    ran = waited = 0
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError, ValueError):
                thread_ran, thread_waited, _ = map(int, (thread / "schedstat").read_text().split())
                ran, waited = ran + thread_ran, waited + thread_waited
    return ran, waited


def processes_by_name(pids: Iterable[int], names: dict[str, str]) -> dict[str, int]:
    """The first process of each name. names: the end of one of the first three words of a command line -> name."""
    found: dict[str, int] = {}
    for pid in pids:
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            for end, name in names.items():
                if any(word.endswith(end) for word in command[:3]):
                    found.setdefault(name, pid)
    return found
