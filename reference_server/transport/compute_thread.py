"""The thread that makes every call of a shard, one at a time: calls posted from other threads, and those of the link.

It waits for files with `poll`: its own wake-up, and the sockets that the link watches. It answers a call first, and
then lets the shard launch its next step before it takes another call.
"""

import asyncio
import functools
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, TypeVar

from reference_server.transport.shard import BlockingShard

logger = logging.getLogger(__name__)

T = TypeVar("T")
WAKE_BYTES = 4096


class Watched(Protocol):
    """A file that the thread waits for."""

    def fileno(self) -> int: ...

    def on_ready(self) -> None:
        """Called in the thread when the file is ready, has failed or was closed by its peer."""
        ...


class ComputeThread:
    """Starts at once. `post`, `call` and `close` are for other threads, the rest for the thread itself."""

    def __init__(self, shard: BlockingShard) -> None:
        self.shard = shard
        self._posted: deque[Callable[[], object]] = deque()
        self._is_closing = self._is_over = False
        self._wakes, self._wake = socket.socketpair()
        for end in (self._wakes, self._wake):
            end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._wakes, select.POLLIN)
        self._ready: dict[int, Callable[[], None]] = {self._wakes.fileno(): self._run_posted}
        self._thread = threading.Thread(target=self._run, name="shard", daemon=True)
        self._thread.start()

    def close(self, wait: bool = True) -> None:
        """Make the calls posted so far, then end the thread."""
        if not self._is_closing:
            self.post(self._end)
            self._is_closing = True
        if wait:
            self._thread.join()

    async def call(self, function: Callable[[], T]) -> T:
        """The result of `function`, called in the thread."""
        reply: Future[T] = Future()
        self.post(functools.partial(self._answer_posted, function, reply))
        return await asyncio.wrap_future(reply)

    def post(self, task: Callable[[], object]) -> None:
        """Run `task` in the thread, after those posted before."""
        if self._is_closing:
            raise RuntimeError("the shard's thread has been closed")
        self._posted.append(task)
        # The thread may have thousands of wake-ups to read, or may have run the task already and ended.
        with suppress(OSError):
            self._wake.send(b"\0")

    def answer(
        self, call: Callable[[], T], reply: Callable[[T], object], fail: Callable[[BaseException], object]
    ) -> None:
        """Make one call of the shard: hand its result to `reply`, or its error to `fail`."""
        try:
            result = call()
        except BaseException as error:
            try:
                self.shard.after_error()
            finally:
                fail(error)
            return
        reply(result)
        self.shard.after_reply()

    def watch(self, file: Watched, events: int = select.POLLIN) -> None:
        """Call `file.on_ready` on these events; replaces an earlier watch."""
        self._poll.register(file, events)
        self._ready[file.fileno()] = file.on_ready

    def forget(self, file: Watched) -> None:
        """End a watch, before the file is closed."""
        self._poll.unregister(file)
        del self._ready[file.fileno()]

    def _run(self) -> None:
        with self.shard.computing():
            while not self._is_over:
                for number, _ in self._poll.poll():
                    # An earlier file of this round may have closed this one.
                    on_ready = self._ready.get(number)
                    if on_ready is not None:
                        self._guarded(on_ready)
        self._wakes.close()
        self._wake.close()

    def _run_posted(self) -> None:
        self._wakes.recv(WAKE_BYTES)
        while self._posted:
            self._guarded(self._posted.popleft())

    def _end(self) -> None:
        self._is_over = True

    @staticmethod
    def _guarded(task: Callable[[], object]) -> None:
        try:
            task()
        except Exception:
            logger.exception("a task of the shard's thread failed")

    def _answer_posted(self, call: Callable[[], T], reply: "Future[T]") -> None:
        if reply.set_running_or_notify_cancel():
            self.answer(call, reply.set_result, reply.set_exception)
