"""Load processes forked from one that has imported locust, so that the run of a test starts without these imports.

Tests of the commands start real processes, which start theirs.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadgen.config.distribution import Distribution
from loadgen.generator import load_process
from loadgen.generator.load_process import WORKER_LOG
from loadgen.generator.messages import WorkerPlan
from tests.support.load_forker import NUMBER

ROOT = Path(__file__).parents[2]
START_LOAD = load_process.start_load
"""The start of a real process, for tests that look for it."""


class ForkedLoad:
    """A load process with the part of `Popen`'s interface that `LoadProcess` uses."""

    def __init__(self, report: socket.socket, output: int) -> None:
        self._report = report
        self.stdout = os.fdopen(output, "rb")
        self.pid = self._receive()
        self.returncode: int | None = None

    def _receive(self) -> int:
        number: int = NUMBER.unpack(self._report.recv(NUMBER.size))[0]
        return number

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._receive()
            self._report.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class LoadForker:
    """The process that forks loads, started for the first of them; it ends when this object is closed."""

    @functools.cached_property
    def _process(self) -> "subprocess.Popen[bytes]":
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.support.load_forker", str(theirs.fileno())]
            return subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )

    def start(self, plan: Mapping[str, Any], out: Path) -> ForkedLoad:
        """As `start_load` for one worker; the parent of the load is the process that forks it."""
        plan = {**plan, "parent_pid": self._process.pid}
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

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Fork the load processes of runs of this process that have one worker."""

        def start(plan: WorkerPlan, distribution: Distribution, out: Path) -> Any:
            return self.start(plan.to_json(), out) if is_forked(distribution) else START_LOAD(plan, distribution, out)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load_process, "start_load", start)
            yield

    def close(self) -> None:
        """End the process, if it has started."""
        if "_process" in vars(self):
            self._control.close()
            self._process.wait()


def is_forked(distribution: Distribution) -> bool:
    """Whether a load is forked: it has one worker, and the system (Linux) has descriptors of processes."""
    return distribution.is_alone and hasattr(os, "pidfd_open")
