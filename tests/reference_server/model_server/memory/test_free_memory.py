"""Free memory between allocations that stay goes back to the system."""

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from reference_server.model_server.memory.free_memory import freed_at_once, return_free_memory

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


HOLES = """
import resource
from pathlib import Path

from reference_server.model_server.memory.free_memory import freed_at_once

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

size, count = 4 << 20, 40
# The C library reuses memory up to the largest that was freed.
largest = bytearray(2 * size)
del largest
with freed_at_once():
    before = resident_bytes()
    # Every second one stays, so the others are holes.
    blocks = [bytearray(b"x" * size) for _ in range(count)]
    kept = blocks[::2]
    del blocks
    print((resident_bytes() - before) / (size * count))
"""


def test_inside_of_freed_at_once_large_memory_between_others_is_returned() -> None:
    # A process of its own: free memory of earlier tests would be reused.
    grown = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True).stdout

    assert float(grown) == pytest.approx(0.5, rel=0.1)


def test_after_freed_at_once_memory_is_reused() -> None:
    with freed_at_once():
        pass
    first = bytearray(8 << 20)
    held = bytearray(SIZE)
    before = resident_bytes()

    del first

    assert before - resident_bytes() < 1 << 20
    assert len(held) == SIZE
