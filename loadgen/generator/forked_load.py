"""Load processes forked from one that has imported locust: a run starts without these imports, about a second.

Used where many short runs follow each other. gevent stays out of this process: the forks are those of `load_forker`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from loadgen.config.distribution import Distribution
from loadgen.generator.load_forker import NUMBER
from loadgen.generator.load_process import WORKER_LOG, RunningLoad, StartLoad, start_load
from loadgen.generator.worker_messages import WorkerPlan


class ForkedLoad:
    """A `RunningLoad` whose parent is the forker, which reports its process id and its exit code."""

    def __init__(self, report: socket.socket, output: int) -> None:
        self._report = report
        self.stdout: IO[bytes] | None = os.fdopen(output, "rb")
        self.pid = self._receive()
        self.returncode: int | None = None

    def _receive(self) -> int:
        """The next number; -SIGKILL if the forker has ended, because its loads end with it."""
        message = self._report.recv(NUMBER.size)
        return int(NUMBER.unpack(message)[0]) if message else -signal.SIGKILL

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._receive()
            self._report.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None and self.pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class LoadForker:
    """The process that forks loads: it starts at once, and ends when this object is closed or this process ends."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-m", "loadgen.generator.load_forker", str(theirs.fileno())]
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )

    def start(self, plan: WorkerPlan, distribution: Distribution, out: Path) -> RunningLoad:
        """As `start_load`, which starts loads of several workers, and all loads after the forker has ended."""
        if not distribution.is_alone or self._process.poll() is not None:
            return start_load(plan, distribution, out)
        # The parent of the load is the process that forks it.
        return self._forked({**plan.to_json(), "parent_pid": self._process.pid}, out)

    def _forked(self, plan: Mapping[str, Any], out: Path) -> ForkedLoad:
        start = {"directory": str(Path.cwd()), "environ": dict(os.environ)}
        report, theirs = socket.socketpair()
        (stdin, written), (output, stdout) = os.pipe(), os.pipe()
        with (out / WORKER_LOG).open("wb") as log:
            descriptors = [stdin, stdout, log.fileno(), theirs.fileno()]
            socket.send_fds(self._control, [json.dumps(start).encode()], descriptors)
        os.close(stdin)
        os.close(stdout)
        theirs.close()
        load = ForkedLoad(report, output)
        with os.fdopen(written, "wb") as file:
            file.write(json.dumps(plan).encode())
        return load

    def close(self) -> None:
        """End the process, and the loads that still run."""
        self._control.close()
        self._process.wait()


@contextmanager
def forked_loads() -> Iterator[StartLoad]:
    """The start of loads for many short runs. Only Linux has the descriptors of processes that the forker waits for."""
    if not hasattr(os, "pidfd_open"):
        yield start_load
        return
    forker = LoadForker()
    try:
        yield forker.start
    finally:
        forker.close()
