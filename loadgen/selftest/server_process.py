"""Starts a server of the selftest as a process of its own, which prints its port, and stops it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loadgen.errors import MeasurementError


@contextmanager
def selftest_server(module: str, flags: Sequence[str]) -> Iterator[str]:
    """Run a module of `loadgen.selftest` as a server; yields its URL. Raises MeasurementError if it does not start."""
    words = [sys.executable, "-m", f"loadgen.selftest.{module}", "--parent-pid", str(os.getpid()), *flags]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise MeasurementError(f"the {module.replace('_', ' ')} did not start")
        yield f"http://127.0.0.1:{int(port)}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
