"""Stops the router on signals, and after a failure of its batching loop."""

import asyncio
import logging
import signal

from reference_server.errors import ServerError
from reference_server.router.batching import Batcher
from reference_server.router.server import HttpServer
from reference_server.router.services import Drain

logger = logging.getLogger(__name__)

#: Time that open connections have to end after the batching loop has failed.
FAILURE_GRACE_S = 2.0


class GracefulStop:
    """On a signal, cancels the start or stops the servers gracefully; a second signal stops them at once.

    `delay_s`: the time in which the servers still accept requests, while `drain` has begun.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.starting: asyncio.Future[None] | None = None
        self.servers: list[HttpServer] = []
        self.drain = Drain()
        self.delay_s = 0.0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        logger.info("signal received, starting graceful shutdown")
        self.drain.has_begun = True
        if not self.servers and self.starting is not None:
            self.starting.cancel()
        if self.is_requested or not self.delay_s:
            self._stop_servers(is_forced=self.is_requested)
        else:
            asyncio.get_running_loop().call_later(self.delay_s, self._stop_servers)
        self.is_requested = True

    def _stop_servers(self, *, is_forced: bool = False) -> None:
        for server in self.servers:
            server.force_exit = server.force_exit or is_forced
            server.should_exit = True


async def run_until_stopped(batcher: Batcher, servers: list[HttpServer], grace_s: float = FAILURE_GRACE_S) -> None:
    """Serve until the servers are stopped. Raises `ServerError` if the batching loop fails first.

    After such a failure, connections that are still open after `grace_s` are closed.
    """
    loop = asyncio.ensure_future(batcher.run())
    serving = [asyncio.ensure_future(server.run_to_end()) for server in servers]
    try:
        await asyncio.wait([loop, *serving], return_when=asyncio.FIRST_COMPLETED)
        for server in servers:
            server.should_exit = True
        if loop.done():
            await asyncio.wait(serving, timeout=grace_s)
            for server in servers:
                server.force_exit = True
        await asyncio.gather(*serving)
    finally:
        loop.cancel()
        outcome = (await asyncio.gather(loop, return_exceptions=True))[0]
    if isinstance(outcome, Exception):
        raise ServerError(f"the batching loop failed: {outcome}") from outcome
