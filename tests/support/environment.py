"""The environment that tests run in: the machine's own variables, and none that changes how the product behaves."""

import contextlib
import locale
import os
import signal
import sys
import time

#: Variables as they were when the suite started. Only what reaches outside the machine (pip) needs them.
OUTSIDE = dict(os.environ)

_MACHINE = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "VIRTUAL_ENV", "CC", "CXX", "SOAK_SECONDS"}
_PEERS = {"TGI_BENCH_VLLM", "TGI_BENCH_LLAMA_SERVER"}
_MACHINE_PREFIXES = ("LD_", "PYTEST_", "PYTHONPATH", "PYTHONHASHSEED", "CUDA_", "TGI_BENCH_CLIENTS")
_FIXED = {
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "COLUMNS": "80",
    "MPLBACKEND": "Agg",
    # Test processes run side by side: one thread each, or they slow each other down.
    "OMP_NUM_THREADS": "1",
}


def isolate() -> None:
    """Keep the machine's variables and fix locale, time zone, width and threads, here and for child processes.

    Byte code is written, because each child process would compile the product again. SIGINT acts as in a terminal:
    jobs that a shell starts in the background ignore it.
    """
    sys.dont_write_bytecode = False
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _MACHINE | _PEERS or name.startswith(_MACHINE_PREFIXES)
    }
    os.environ.clear()
    os.environ.update(kept | _FIXED)
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    time.tzset()
    with contextlib.suppress(ValueError):  # Not the main thread.
        signal.signal(signal.SIGINT, signal.default_int_handler)
