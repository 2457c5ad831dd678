"""The model's files in the page cache before a launch: left alone, read into it, or dropped from it.

Pages are dropped by `posix_fadvise(DONTNEED)`, which needs no root. The kernel keeps pages that are dirty or mapped by
another process, so the share that is still cached is measured by `mincore` and recorded.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loadgen.errors import UsageError

FileCacheState = Literal["natural", "cold", "warm"]
WEIGHTS = frozenset((".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx"))
READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FileCache:
    """Weight files, and the state that the page cache has of them at every launch."""

    state: FileCacheState = "natural"
    files: tuple[Path, ...] = ()

    @classmethod
    def of(cls, state: FileCacheState, named: Sequence[str], words: Sequence[str]) -> "FileCache":
        """The cache for a command: the named files and folders, else those that its words name. Raises UsageError."""
        if state == "natural":
            return cls()
        for name in named:
            if not Path(name).exists():
                raise UsageError(f"`model_files` is {name!r}: no such file or folder")
        files = weight_files(named or [word.partition("=")[2] or word for word in words])
        if not files:
            raise UsageError(
                f"`file_cache` is {state!r} but the server's command names no weight files; give --model-files"
            )
        return cls(state, files)

    def prepare(self) -> dict[str, Any] | None:
        """Bring the cache into its state; returns the facts for the manifest, None for `natural`."""
        if self.state == "natural":
            return None
        act = _drop if self.state == "cold" else _read
        for file in self.files:
            act(file)
        num_bytes = sum(file.stat().st_size for file in self.files)
        cached = sum(cached_bytes(file) for file in self.files)
        return {
            "state": self.state,
            "files": len(self.files),
            "bytes": num_bytes,
            "cached_share": cached / num_bytes if num_bytes else None,
        }


NATURAL = FileCache()


def weight_files(names: Iterable[str]) -> tuple[Path, ...]:
    """The weight files among names of files and folders; a named file counts if it has a suffix of weights."""
    found: dict[Path, None] = {}
    for name in names:
        path = Path(name)
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found |= dict.fromkeys(each for each in inside if each.suffix in WEIGHTS and each.is_file())
    return tuple(found)


def cached_bytes(path: Path) -> int:
    """The bytes of a file that are in the page cache, in whole pages."""
    size = path.stat().st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "cannot map", str(path))
    try:
        if libc.mincore(address, size, pages):
            raise OSError(ctypes.get_errno(), "cannot read the page cache's state", str(path))
    finally:
        libc.munmap(address, size)
    return min(size, mmap.PAGESIZE * sum(page & 1 for page in pages.raw))


def _drop(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(READ_BYTES):
            pass
