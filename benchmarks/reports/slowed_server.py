"""Runs a server behind a relay that delays its responses: a slowdown of known size, to test the gate.

    python benchmarks/reports/slowed_server.py --factor 1.15 text-generation-launcher --model-id preset:tiny-llama

A byte that the server sends t seconds after its request is forwarded after `factor` * t seconds, so TTFT, TPOT and E2E
grow by the same factor. In a comparison, start both servers behind the relay, one of them with factor 1, so that both
have its cost.
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
    """Start the command on a free port and relay to it until the command ends."""
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
    """Forward requests immediately and responses with the delay, until one side closes."""
    clock = asyncio.get_running_loop().time
    sent_s = clock()
    delayed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def requests() -> None:
        nonlocal sent_s
        while data := await client.read(READ_BYTES):
            sent_s = clock()
            to_server.write(data)
            await to_server.drain()

    async def reads() -> None:
        while data := await server.read(READ_BYTES):
            delayed.put_nowait((sent_s + factor * (clock() - sent_s), data))
        delayed.put_nowait((clock(), b""))

    async def responses() -> None:
        while True:
            due_s, data = await delayed.get()
            await asyncio.sleep(max(due_s - clock(), 0.0))
            if not data:
                return
            to_client.write(data)
            await to_client.drain()

    tasks = [asyncio.create_task(each) for each in (requests(), reads(), responses())]
    try:
        # A delayed response may end after the server closed, so the end of `reads` does not end the relay.
        await asyncio.wait((tasks[0], tasks[2]), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--factor", type=float, required=True, help="Factor of response times; 1.15 means 15 %% longer."
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="The server command; it reads its port from PORT.")
    args = parser.parse_args()
    if args.factor < 1 or not args.command:
        parser.error("`--factor` must be at least 1, followed by the server command")
    return asyncio.run(serve(int(os.environ["PORT"]), args.factor, args.command))


if __name__ == "__main__":
    sys.exit(main())
