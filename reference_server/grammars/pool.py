"""Compiles grammars in killable workers with limits. Imports no grammar library."""

import importlib.util

from reference_server.workers import WorkerLimits, WorkerPool

NEEDED_PACKAGES = ("llguidance", "outlines_core", "jsonschema_rs")

#: Processor time of one step of a grammar, in the worker's trial and in a batch. Expressions are limited too
#: (limits.py), but one of a wide regex may cost a thousand times as much as another.
MAX_STEP_NS = 50_000_000
LIMITS = WorkerLimits(time_s=5.0, memory_bytes=1 << 30, max_waiting=32)


def missing_packages() -> list[str]:
    """Packages of the `grammar` extra that are not installed."""
    return [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]


def worker_pool(size: int, limits: WorkerLimits = LIMITS) -> WorkerPool:
    """Workers that run the jobs of grammar_worker.py."""
    return WorkerPool("reference_server.grammars.grammar_worker", {}, limits, size)
