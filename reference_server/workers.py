"""Processes for work that a client or a model's author shapes and that may not end: they are killed at a limit.

A worker is `python -m MODULE`: it reads a set-up frame and then one job frame after another from stdin, and answers
each on stdout (`serve_jobs`). A frame is four bytes of length and JSON. reliability.md Q8, Q11, F17, F22.
"""

import asyncio
import contextlib
import json
import logging
import resource
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reference_server.bare_environment import bare_environment
from reference_server.errors import OverloadedError, StartupError

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("!I")
#: How long a worker may take to import what it needs and to set itself up.
START_S = 30.0
RETRY_S = 1.0

Job = Callable[[Any], Any]


class JobError(Exception):
    """The job failed; the text is the worker's."""


class JobLimitError(Exception):
    """The job was stopped at a limit, which the text names; `limit` is that limit's word, time or memory."""

    def __init__(self, text: str, limit: str) -> None:
        super().__init__(text)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Of one job: seconds. Of one worker: bytes of address space. Of the pool: jobs that wait."""

    time_s: float
    memory_bytes: int
    max_waiting: int


class WorkerPool:
    """`size` processes of one module, each doing one job at a time."""

    def __init__(self, module: str, setup: Mapping[str, Any], limits: WorkerLimits, size: int) -> None:
        self._module = module
        self._setup = {"limits": {"memory_bytes": limits.memory_bytes, "time_s": limits.time_s}, **setup}
        self._limits = limits
        self._size = size
        self._idle: asyncio.Queue[Process] = asyncio.Queue()
        self._processes: set[Process] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting = 0
        self._is_closed = False

    async def start(self) -> None:
        """Start all workers. Raises `StartupError` with the reason of one that cannot."""
        await asyncio.gather(*(self._add_worker() for _ in range(self._size)))

    async def run(self, job: Any) -> Any:
        """The answer to `job`. Raises `JobError`, `JobLimitError`, and `OverloadedError` when too many wait."""
        if self._waiting >= self._limits.max_waiting:
            raise OverloadedError
        self._waiting += 1
        try:
            process = await self._idle.get()
        finally:
            self._waiting -= 1
        # A caller that is cancelled leaves the worker to its job: its answer is read and thrown away.
        return await asyncio.shield(self._spawn(self._work(process, job)))

    async def close(self) -> None:
        """Kill every worker; what they were at fails."""
        self._is_closed = True
        while self._processes or self._tasks:
            for process in list(self._processes):
                await self._kill(process)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, process: Process, job: Any) -> Any:
        try:
            async with asyncio.timeout(self._limits.time_s):
                answer = await _exchange(process, job)
        except TimeoutError:
            self._replace(process)
            raise JobLimitError(f"it took longer than {self._limits.time_s:g} s", "time") from None
        except (OSError, asyncio.IncompleteReadError):
            self._replace(process)
            # Native code that gets no more memory ends its process.
            raise JobLimitError("its worker died", "memory") from None
        self._idle.put_nowait(process)
        return self._value(answer)

    def _value(self, answer: Mapping[str, Any]) -> Any:
        if "memory" in answer:
            raise JobLimitError(f"it used more than {self._limits.memory_bytes >> 20} MiB", "memory")
        if "error" in answer:
            raise JobError(answer["error"])
        return answer["value"]

    async def _add_worker(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
            env=bare_environment(),
        )
        self._processes.add(process)
        try:
            async with asyncio.timeout(START_S):
                self._value(await _exchange(process, self._setup))
        except (TimeoutError, OSError, asyncio.IncompleteReadError, JobError, JobLimitError) as error:
            await self._kill(process)
            raise StartupError(str(error) or f"{self._module} does not start") from error
        self._idle.put_nowait(process)

    def _replace(self, process: Process) -> None:
        """Kill a worker that cannot be relied on and start another, beside whatever else goes on."""

        async def replace() -> None:
            await self._kill(process)
            while not self._is_closed:
                try:
                    await self._add_worker()
                except (OSError, StartupError):
                    if not self._is_closed:
                        logger.exception("a worker could not be replaced and is tried again")
                        await asyncio.sleep(RETRY_S)
                else:
                    break

        self._spawn(replace())

    async def _kill(self, process: Process) -> None:
        self._processes.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None, "made with pipes"
        process.stdin.close()
        await process.wait()

    def _spawn(self, work: Any) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to the caller, who may have gone


async def _exchange(process: Process, value: Any) -> Mapping[str, Any]:
    assert process.stdin is not None, "made with pipes"
    assert process.stdout is not None, "made with pipes"
    body = json.dumps(value).encode()
    process.stdin.write(_LENGTH.pack(len(body)) + body)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    answer: Mapping[str, Any] = json.loads(await process.stdout.readexactly(length))
    return answer


def serve_jobs(make_job: Callable[[Mapping[str, Any]], Job], failures: tuple[type[Exception], ...]) -> None:
    """The whole of a worker: `make_job(setup)` is asked once, its result for every job; `failures` are told as errors.

    Ends with its parent. Raises nothing: what is not among `failures` ends the process.
    """
    source, sink = sys.stdin.buffer, sys.stdout.buffer

    def read() -> Any:
        head = source.read(_LENGTH.size)
        return json.loads(source.read(_LENGTH.unpack(head)[0])) if len(head) == _LENGTH.size else None

    def answer(work: Callable[[], Any]) -> Any:
        value = None
        try:
            value = work()
            body = json.dumps({"value": None if callable(value) else value}).encode()
        except MemoryError:
            body = b'{"memory":true}'
        except failures as error:
            body = json.dumps({"error": str(error)}).encode()
        sink.write(_LENGTH.pack(len(body)) + body)
        sink.flush()
        return value

    setup = read()
    if setup is None:
        return
    limits = setup["limits"]
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    job = answer(lambda: make_job(setup))
    while job is not None and (value := read()) is not None:
        # Should the parent be gone, nobody else ends a job that does not.
        signal.alarm(int(limits["time_s"]) + 2)
        answer(lambda value=value: job(value))  # type: ignore[misc]
        signal.alarm(0)
