"""A TCP relay between two loopback addresses, instead of the network of two hosts. A test can cut and restore it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """Forwards connections to `target`. Cut, it carries nothing, no FIN and no RST, like a pulled cable."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.address = ""
        self._target = target
        self._mended = asyncio.Event()
        self._mended.set()
        self._lost = 0  # connections made before this cut are dead when the link is mended
        self._pumps: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._mended.clear()
        self._lost += 1

    def mend(self) -> None:
        self._mended.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._mended.wait()
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        made_before = self._lost
        with contextlib.suppress(ConnectionError), contextlib.closing(sink):
            while data := await source.read(65536):
                await self._mended.wait()
                if self._lost != made_before:
                    return
                sink.write(data)
                await sink.drain()

    async def end(self) -> None:
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


@asynccontextmanager
async def relay_to(host: str, port: int, listen: str = "127.0.0.3") -> AsyncIterator[Relay]:
    """A relay on a free port of `listen`; its `address` is what the router dials."""
    relay = Relay((host, port))
    server = await asyncio.start_server(relay.accept, listen, 0)
    relay.address = "tcp://{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield relay
    finally:
        server.close()
        await relay.end()
        await server.wait_closed()
