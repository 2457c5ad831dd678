"""Returns memory that the C library keeps for later allocations to the system.

Weights that are packed one after the other leave holes between those that stay: as much memory as the weights.
"""

import ctypes
import functools
from collections.abc import Callable


def return_free_memory() -> None:
    """Return whole free pages. Does nothing with a C library that has no `malloc_trim`."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    found: Callable[[int], int] = trim
    return found
