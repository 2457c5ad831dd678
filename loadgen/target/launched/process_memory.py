"""Memory of a launched server and of this machine, and the number of its GPUs, from the kernel's files (Linux)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
NVIDIA = Path("/proc/driver/nvidia/gpus")


def memory_of(pid: int) -> tuple[int, int] | None:
    """Resident bytes of a process with its descendants, and the bytes that are free; None if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        page = os.sysconf("SC_PAGE_SIZE")
        resident = sum(int((PROC / str(each) / "statm").read_text().split()[1]) for each in family(pid))
        lines = dict(line.split(":") for line in (PROC / "meminfo").read_text().splitlines())
        return resident * page, int(lines["MemAvailable"].split()[0]) * 1024
    return None


def num_gpus() -> int:
    """NVIDIA GPUs with a driver."""
    return len(list(NVIDIA.iterdir())) if NVIDIA.is_dir() else 0


def family(pid: int) -> Iterator[int]:
    """The process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for path in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name of a process, in parentheses, may hold spaces.
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        yield current
        waiting += parents.get(current, [])
