"""A child process in its own process group: its output is relayed, and it is stopped or killed with its group."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reference_server.bare_environment import bare_environment
from reference_server.errors import StartupError
from reference_server.launcher import guardian
from reference_server.launcher.children import ChildCommand
from reference_server.launcher.log_relay import MAX_LINE_BYTES, Scope, collect, relay_records, relay_unchanged

logger = logging.getLogger(__name__)

OUTPUT_GRACE_S = 1.0


class Child:
    """A running child process. `name` is its name in messages."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, relays: Sequence[asyncio.Task[None]]) -> None:
        self.name = name
        self.process = process
        self._relays = relays
        self._errors: asyncio.Task[str] | None = None

    @classmethod
    async def spawn(cls, name: str, command: ChildCommand, scope: Scope | None) -> "Child":
        """Start `command`. With a `scope` its log records are logged under it; without, its output is echoed.

        Raises `StartupError` if the program is missing.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=dict(command.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                process_group=0,
            )
        except OSError as error:
            raise StartupError(
                f"{command.argv[0]} cannot be started ({error.strerror}): install the `server` extra, "
                "pip install 'tgi-bench[server]'"
            ) from error
        assert process.stdout is not None
        assert process.stderr is not None
        if scope is None:
            echoes = (relay_unchanged(process.stdout), relay_unchanged(process.stderr, to_stderr=True))
            return cls(name, process, [asyncio.create_task(echo) for echo in echoes])
        child = cls(name, process, [asyncio.create_task(relay_records(process.stdout, scope))])
        child._errors = asyncio.create_task(collect(process.stderr))
        return child

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    @property
    def returncode(self) -> int:
        """The exit status of a process that has ended."""
        assert self.process.returncode is not None, f"{self.name} is running"
        return self.process.returncode

    async def wait(self) -> int:
        """The exit status, negative for a signal, once the process has ended."""
        return await self.process.wait()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM to the child itself, SIGKILL to its group after `timeout_s`."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), timeout_s)
        if self.running:
            logger.warning("%s did not end %g s after SIGTERM: killing it", self.name, timeout_s)
        await self.kill()

    def kill_group(self) -> None:
        """SIGKILL the process and its descendants."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def kill(self) -> None:
        """Kill the process and its descendants, and wait for its output."""
        self.kill_group()
        await self.process.wait()
        await self._drain()

    async def errors(self) -> str:
        """The stderr of the process, which has ended."""
        await self._drain()
        return self._errors.result() if self._errors is not None and self._errors.done() else ""

    async def _drain(self) -> None:
        # A descendant outside the group may keep the pipes open.
        tasks: list[asyncio.Task[Any]] = [*self._relays, *([self._errors] if self._errors else [])]
        _, pending = await asyncio.wait(tasks, timeout=OUTPUT_GRACE_S)
        for task in pending:
            task.cancel()


def describe_end(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    except ValueError:
        return f"was killed by signal {-returncode}"


class Guardian:
    """The process of `guardian.py`, which ends the child processes if this process is killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "Guardian":
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(Path(guardian.__file__)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=bare_environment(),
            )
        )  # fmt: skip

    def watch(self, child: Child, drains: bool) -> None:
        """End `child` with this process; with `drains`, by SIGTERM first."""
        self._send(f"child {child.pid} {guardian.start_time(child.pid) or '-'} {'drain' if drains else 'kill'}")

    def forget(self, child: Child) -> None:
        self._send(f"ended {child.pid}")

    def remove_at_end(self, path: Path) -> None:
        """Remove `path` when this process ends."""
        self._send(f"path {path}")

    async def dismiss(self) -> None:
        """End the guardian: every process is stopped and every path removed."""
        self._send("done")
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(f"{line}\n".encode())
