"""Worker processes for jobs with input from clients or model repositories, killed at a limit of time or memory.

A worker is `python -m MODULE`: it reads a set-up frame and then job frames from stdin, and writes a reply to each to
stdout (`serve_jobs`). A frame is four bytes of length and JSON.
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
#: Limit of a worker's imports and set-up.
START_S = 30.0
RETRY_S = 1.0

Job = Callable[[Any], Any]


class JobError(Exception):
    """The job failed; the text is the worker's."""


class JobLimitError(Exception):
    """The job was stopped at a limit; `limit` is `time` or `memory`."""

    def __init__(self, text: str, limit: str) -> None:
        super().__init__(text)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Seconds of a job, bytes of address space of a worker, and waiting jobs of the pool."""

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
        """Start all workers. Raises `StartupError` with the reason if one fails."""
        await asyncio.gather(*(self._add_worker() for _ in range(self._size)))

    async def run(self, job: Any) -> Any:
        """The result of `job`. Raises `JobError`, `JobLimitError`, and `OverloadedError` if too many wait."""
        if self._waiting >= self._limits.max_waiting:
            raise OverloadedError
        self._waiting += 1
        try:
            process = await self._idle.get()
        finally:
            self._waiting -= 1
        # If the caller is cancelled, the job goes on: its reply must be read before the next job.
        return await asyncio.shield(self._spawn(self._work(process, job)))

    async def close(self) -> None:
        """Kill every worker; their jobs fail."""
        self._is_closed = True
        while self._processes or self._tasks:
            for process in list(self._processes):
                await self._kill(process)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, process: Process, job: Any) -> Any:
        try:
            async with asyncio.timeout(self._limits.time_s):
                answer = await _call(process, job)
        except TimeoutError:
            self._replace(process)
            raise JobLimitError(f"it took longer than {self._limits.time_s:g} s", "time") from None
        except (OSError, asyncio.IncompleteReadError):
            self._replace(process)
            # Native code aborts its process when it gets no memory.
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
                self._value(await _call(process, self._setup))
        except (TimeoutError, OSError, asyncio.IncompleteReadError, JobError, JobLimitError) as error:
            await self._kill(process)
            raise StartupError(str(error) or f"{self._module} does not start") from error
        self._idle.put_nowait(process)

    def _replace(self, process: Process) -> None:
        """Kill a worker and start another in the background."""

        async def replace() -> None:
            await self._kill(process)
            while not self._is_closed:
                try:
                    await self._add_worker()
                except (OSError, StartupError):
                    if not self._is_closed:
                        logger.exception("could not replace a worker; trying again")
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
            task.exception()  # the caller gets it too, unless it was cancelled


async def _call(process: Process, value: Any) -> Mapping[str, Any]:
    assert process.stdin is not None, "made with pipes"
    assert process.stdout is not None, "made with pipes"
    body = json.dumps(value).encode()
    process.stdin.write(_LENGTH.pack(len(body)) + body)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    answer: Mapping[str, Any] = json.loads(await process.stdout.readexactly(length))
    return answer


def serve_jobs(make_job: Callable[[Mapping[str, Any]], Job], failures: tuple[type[Exception], ...]) -> None:
    """The main loop of a worker: `make_job(setup)` is called once, its result for every job.

    Exceptions among `failures` are sent as errors; others end the process. It ends with its parent.
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
        # Ends a job that does not return when the parent is gone.
        signal.alarm(int(limits["time_s"]) + 2)
        answer(lambda value=value: job(value))  # type: ignore[misc]
        signal.alarm(0)
