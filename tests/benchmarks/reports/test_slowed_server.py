"""The relay that slows a server forwards every byte in order, and ends after the response."""

import asyncio

from benchmarks.reports.slowed_server import relay


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Two answers to two lines, in pieces; then the end."""
    for _ in range(2):
        line = await reader.readline()
        for piece in (b"to ", line.strip(), b": ", b"yes\n"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
    writer.close()


async def test_responses_arrive_complete_and_in_order_and_the_end_is_forwarded() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    inner = server.sockets[0].getsockname()[1]

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection("127.0.0.1", inner)
        await relay(reader, writer, *upstream, 1.5)
        upstream[1].close()
        writer.close()

    front = await asyncio.start_server(connected, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.sockets[0].getsockname()[1])
    writer.write(b"one\n")
    first = await reader.readline()
    writer.write(b"two\n")
    rest = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    front.close()
    server.close()

    assert first == b"to one: yes\n"
    assert rest == b"to two: yes\n"
