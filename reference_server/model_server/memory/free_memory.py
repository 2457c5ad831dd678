"""Returns memory that the C library keeps for later allocations to the system.

Weights that are packed one after the other leave holes between those that stay: as much memory as the weights.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAX_MMAP_THRESHOLD = 32 << 20
"""glibc raises its threshold up to this by itself, as tensors are freed, and the other one to twice as much."""


def return_free_memory() -> None:
    """Return whole free pages. Does nothing with a C library that has no `malloc_trim`."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@contextmanager
def freed_at_once(min_bytes: int = 1 << 20) -> Iterator[None]:
    """Memory of at least `min_bytes` goes back to the system when it is freed, as it is not reused.

    The tensors of a long prefill otherwise leave holes of several times their size. Steps that repeat are faster with
    memory that is reused: afterwards this is so up to the C library's own maximum. Needs glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        yield
        return
    mallopt(_MMAP_THRESHOLD, min_bytes)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2 * _MAX_MMAP_THRESHOLD)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    found: Callable[[int], int] = trim
    return found
