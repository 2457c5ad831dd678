"""Returns memory that the C library keeps for later allocations to the system.

Packing weights one after the other leaves holes between the packed ones: as much memory as the weights.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAX_MMAP_THRESHOLD = 32 << 20
"""glibc itself raises its mmap threshold up to this as tensors are freed, and its trim threshold to twice as much."""


def return_free_memory() -> None:
    """Return whole free pages. Does nothing with a C library that has no `malloc_trim`."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@contextmanager
def freed_at_once(min_bytes: int = 1 << 20) -> Iterator[None]:
    """Allocations of at least `min_bytes` are returned to the system when they are freed, and not reused.

    The tensors of a long prefill otherwise leave holes of several times their size. Repeated steps are faster with
    reused memory: afterwards, memory is reused up to the C library's own maximum. Needs glibc.
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
