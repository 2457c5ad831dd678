"""The environment of a run: versions, operating system, CPU, memory, source revision."""

import contextlib
import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

LIBRARIES = ("locust", "gevent", "pandas", "pyarrow", "torch", "transformers", "tokenizers")


def product_version() -> str:
    return _version("tgi-bench") or ""


def library_versions() -> dict[str, str]:
    """Installed versions, without importing anything."""
    return {name: version for name in LIBRARIES if (version := _version(name))}


@functools.cache
def _version(package: str) -> str | None:
    """Read once a process: parsing the metadata of torch and its like takes longer than the rest of a manifest."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def source_revision() -> str | None:
    """The commit of this package's checkout, with `-dirty` if it was changed; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    revision = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}-dirty" if revision and changed else revision


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def gpu_names() -> list[str]:
    """The names of this machine's NVIDIA GPUs, by nvidia-smi; empty without it."""
    query = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def request_realtime(*, before_others: bool = False) -> bool:
    """Request real-time scheduling for the calling thread; returns False if that is not permitted.

    before_others: before the processes that request it without this.

    Otherwise, on a machine that a server keeps busy, a waiting process wakes tens of milliseconds late, and so do its
    timestamps.
    """
    if not hasattr(os, "sched_setscheduler"):
        return False
    try:
        priority = os.sched_get_priority_min(os.SCHED_RR) + before_others
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))
    except OSError:
        return False
    return True


def describe_machine() -> dict[str, Any]:
    """Operating system, kernel, processor, memory and the limits of a container."""
    return {
        "os": _os_name(),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "container_cpu_max": _first_line("/sys/fs/cgroup/cpu.max"),
        "container_memory_max": _first_line("/sys/fs/cgroup/memory.max"),
    }


def _os_name() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return platform.system()


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _first_line(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return None
