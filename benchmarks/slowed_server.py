"""A server command behind a relay that stretches every answer: a slowdown of a known size, to try the gate on.

    python benchmarks/slowed_server.py --factor 1.15 text-generation-launcher --model-id preset:tiny-llama

A byte that the server sent t seconds after its request is passed on after `factor` times t, so TTFT, TPOT and E2E grow
by the same share. Both sides of a comparison go through it, one with a factor of 1: its own cost is then on both.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys

READ_BYTES = 65_536


async def serve(port: int, factor: float, command: list[str]) -> int:
    """Start the command on a port of its own and relay to it until either ends."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        inner = int(held.getsockname()[1])
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "PORT": str(inner)})
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _terminate, process)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            upstream = await asyncio.open_connection("127.0.0.1", inner)
            with contextlib.closing(upstream[1]):
                await relay(reader, writer, *upstream, factor)

    async with await asyncio.start_server(connected, "127.0.0.1", port):
        return await process.wait()


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


async def relay(
    client: asyncio.StreamReader,
    to_client: asyncio.StreamWriter,
    server: asyncio.StreamReader,
    to_server: asyncio.StreamWriter,
    factor: float,
) -> None:
    """Pass requests on at once and answers late, until one of the two closes."""
    clock = asyncio.get_running_loop().time
    asked_s = clock()
    late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def requests() -> None:
        nonlocal asked_s
        while data := await client.read(READ_BYTES):
            asked_s = clock()
            to_server.write(data)
            await to_server.drain()

    async def reads() -> None:
        while data := await server.read(READ_BYTES):
            late.put_nowait((asked_s + factor * (clock() - asked_s), data))
        late.put_nowait((clock(), b""))

    async def answers() -> None:
        while True:
            due_s, data = await late.get()
            await asyncio.sleep(max(due_s - clock(), 0.0))
            if not data:
                return
            to_client.write(data)
            await to_client.drain()

    tasks = [asyncio.create_task(each) for each in (requests(), reads(), answers())]
    try:
        # An answer may end after the server closed; only the client's end or the last answer ends the relay.
        await asyncio.wait((tasks[0], tasks[2]), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, required=True, help="1.15: everything takes 15 %% longer.")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="The server; it takes its port from PORT.")
    given = parser.parse_args()
    if given.factor < 1 or not given.command:
        parser.error("give a factor of 1 or more and the server's command")
    return asyncio.run(serve(int(os.environ["PORT"]), given.factor, given.command))


if __name__ == "__main__":
    sys.exit(main())
