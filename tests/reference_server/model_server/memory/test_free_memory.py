"""Free memory between allocations that stay goes back to the system."""

import ctypes
import resource
from pathlib import Path

import pytest

from reference_server.model_server.memory.free_memory import return_free_memory

STATM = Path("/proc/self/statm")
SIZE, COUNT = 100_000, 800
pytestmark = pytest.mark.skipif(
    not STATM.is_file() or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs Linux and glibc"
)


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


def test_holes_between_blocks_that_stay_are_returned() -> None:
    # Smaller than what the C library maps by itself.
    blocks = [bytearray(b"x" * SIZE) for _ in range(COUNT)]
    kept = blocks[::20]
    del blocks
    before = resident_bytes()

    return_free_memory()

    assert before - resident_bytes() > 0.5 * SIZE * COUNT
    assert all(block == b"x" * SIZE for block in kept)
