"""Reads responses in callbacks of gevent's loop; the greenlet sleeps until the response has ended.

Imports gevent, so only the worker may import it.
"""

from typing import Any

import gevent
from gevent.event import AsyncResult

from loadgen.http.connection import READ_BYTES, Connection, Receiver

READABLE = 1


class HubConnection(Connection):
    """A connection whose `receive` switches greenlets once per response instead of once per read."""

    def receive(self, receiver: Receiver) -> None:
        receive, clock_ns = self.arrivals.receive, self.arrivals.clock_ns
        # gevent's sockets wrap the system's, whose call costs less.
        recvmsg = getattr(self.sock, "_sock", self.sock).recvmsg
        self.sock.settimeout(0)
        end: AsyncResult[None] = AsyncResult()
        watcher: Any = gevent.get_hub().loop.io(self.sock.fileno(), READABLE)

        def read() -> None:
            try:
                is_over = receiver.take(*receive(recvmsg, READ_BYTES))
            except BlockingIOError:
                return
            except BaseException as error:  # raised in the waiting greenlet
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
