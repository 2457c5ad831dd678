"""The compiled CPU kernels: built at first use by the machine's own compiler, then read from a cache.

They are optional: without a compiler, or if the build fails, `kernels` logs the reason once and returns None, and the
plain torch versions run. Importing this module builds nothing.
"""

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from reference_server.model_server.cpu_kernels import fakes

logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
SOURCES = (
    "linear.cpp",
    "panels_avx512.cpp",
    "panels_avx2.cpp",
    "float8_linear.cpp",
    "attention.cpp",
    "elementwise.cpp",
    "walk.cpp",
    "integers.cpp",
    "integer_linear.cpp",
    "adapters.cpp",
    "greedy.cpp",
)
HEADERS = ("elements.h", "float8.h", "rows.h", "panels.h", "kernels.h", "integers.h")
# The last flag selects torch's stable interface of 2.11, the oldest supported release.
FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp-simd", "-fno-math-errno"),
    *(
        "-fno-trapping-math",
        "-ffp-contract=fast",
        "-fPIC",
        "-w",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
    ),
)
# For one source: about 10 s of processor time each on an idle machine, much longer on a busy one.
COMPILE_TIMEOUT_S = 600


@functools.cache
def kernels() -> Any | None:
    """The operators (`torch.ops.reference_server_cpu`), or None if they cannot be built; logs the reason once."""
    try:
        library = build(cache_directory())
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("the compiled CPU kernels are not used: %s", _reason(error))
        return None
    operators = torch.ops.reference_server_cpu
    fakes.register(operators)
    return operators


def build(directory: Path) -> Path:
    """The library for this source, torch and processor in `directory`, compiled if it is missing.

    Of several processes one compiles and the others wait; a killed build leaves no library. Raises OSError or
    subprocess.SubprocessError.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError(f"no C++ compiler found ({', '.join(COMPILERS)})")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = directory / f"{_key(compiler)}.so"
    if library.is_file():
        return library
    with _lock(library.with_suffix(".lock")):
        if not library.is_file():
            _compile(compiler, library)
    return library


def find_compiler() -> str | None:
    """The first C++ compiler on the path."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def _compile(compiler: str, library: Path) -> None:
    logger.info("compiling the CPU kernels into %s", library)
    source = Path(__file__).parent
    torch_root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as temporary:
        objects = {name: str(Path(temporary) / f"{name}.o") for name in SOURCES}

        def compile_one(name: str) -> None:
            include = f"-I{torch_root}/include"
            _run([compiler, *_flags(), "-c", include, str(source / name), "-o", objects[name]])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, SOURCES))
        unfinished = Path(temporary) / library.name
        libraries = (f"-L{torch_root}/lib", "-ltorch_cpu", "-lc10")
        _run([compiler, "-shared", *objects.values(), "-o", str(unfinished), *libraries])
        unfinished.replace(library)


def _run(words: Sequence[str]) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)


def _flags() -> Sequence[str]:
    """The compiler flags; only x86 has vectors of 512 bits."""
    return FLAGS if platform.machine() == "x86_64" else [flag for flag in FLAGS if "vector-width" not in flag]


def _key(compiler: str) -> str:
    """A digest of all that the library depends on; machines that differ may share a home directory."""
    digest = hashlib.sha256()
    for name in (*HEADERS, *SOURCES):
        digest.update((Path(__file__).parent / name).read_bytes())
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    digest.update("\n".join((version, torch.__version__, platform.machine(), _processor(), *_flags())).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """The line of /proc/cpuinfo that lists the instruction sets."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """A lock of one process at a time; the system releases it when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_directory() -> Path:
    """In the user's cache; a new directory of this process if that is not writable, or if others can write it."""
    directory = Path.home() / ".cache" / "tgi-bench" / "kernels"
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(directory):
            logger.warning("the compiled CPU kernels are not cached: other users can write %s", directory)
        elif os.access(directory, os.W_OK):
            return directory
    return Path(tempfile.mkdtemp(prefix="tgi-bench-kernels-"))


def _is_ours(directory: Path) -> bool:
    """Whether a directory is this user's, and not for all to write: a home may be shared, or be /tmp.

    Its group may write: volumes of Kubernetes are often so.
    """
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH


def _reason(error: Exception) -> str:
    """The compiler's first error, or the exception's text."""
    if isinstance(error, subprocess.CalledProcessError):
        first = next((line for line in error.stderr.splitlines() if "error" in line), "no message")
        return f"the compiler failed: {first}"
    return str(error)
