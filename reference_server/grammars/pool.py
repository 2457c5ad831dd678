"""Where grammars are compiled: killable workers with the limits of reliability.md Q11. Imports no grammar library."""

import importlib.util

from reference_server.workers import WorkerLimits, WorkerPool

LIMITS = WorkerLimits(time_s=5.0, memory_bytes=1 << 30, max_waiting=32)

NEEDED_PACKAGES = ("llguidance", "outlines_core", "jsonschema_rs")


def missing_packages() -> list[str]:
    """What the `grammar` extra would bring and is not installed."""
    return [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]


def worker_pool(size: int, limits: WorkerLimits = LIMITS) -> WorkerPool:
    """Workers whose jobs are worker.py's."""
    return WorkerPool("reference_server.grammars.worker", {}, limits, size)
