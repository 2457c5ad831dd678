"""Reading on gevent's loop itself: a read costs a callback, and its greenlet sleeps until the whole response is there.

Imported by the worker only.
"""

import os
import ssl
from typing import Any

import gevent
from gevent.event import AsyncResult

from loadgen.connection import READ_BYTES, Connection, Receiver

READABLE = 1


class HubConnection(Connection):
    """A connection whose `receive` switches greenlets once a response instead of once a read."""

    def receive(self, receiver: Receiver) -> None:
        if isinstance(self.sock, ssl.SSLSocket):
            super().receive(receiver)
            return
        clock_ns = self.clock_ns
        fd = self.sock.fileno()
        end: AsyncResult[None] = AsyncResult()
        watcher: Any = gevent.get_hub().loop.io(fd, READABLE)

        def read() -> None:
            try:
                data = os.read(fd, READ_BYTES)
                is_over = receiver.take(data, clock_ns())
            except BlockingIOError:
                return
            except BaseException as error:  # belongs to the greenlet that waits
                watcher.stop()
                end.set_exception(error)
                return
            if is_over:
                watcher.stop()
                end.set()

        watcher.start(read)
        try:
            while not end.ready():
                end.wait(receiver.left_s(clock_ns()))
            end.get(block=False)
        finally:
            watcher.stop()
            watcher.close()
