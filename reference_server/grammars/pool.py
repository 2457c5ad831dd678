"""Where grammars are compiled: killable workers with the limits of reliability.md Q11. Imports no grammar library."""

from reference_server.workers import WorkerLimits, WorkerPool

#: What one step of a grammar may take of a thread's own time, where it is tried out and where it is walked. Expressions
#: are bounded too (regex_limits.py), but one of a wide regex may cost a thousand times what others do.
MAX_STEP_NS = 50_000_000
LIMITS = WorkerLimits(time_s=5.0, memory_bytes=1 << 30, max_waiting=32)


def worker_pool(size: int, limits: WorkerLimits = LIMITS) -> WorkerPool:
    """Workers whose jobs are worker.py's."""
    return WorkerPool("reference_server.grammars.worker", {}, limits, size)
