"""A model server for launcher tests: answers Health from a `ScriptedShard`, then follows STUB_SHARD.

`python stub_server.py serve MODEL --uds-path PREFIX … | download-weights …`. STUB_SHARD is a comma list for all ranks:
`deaf` ignores SIGTERM, `exit=N` leaves with N once Health has answered, `early=N` before listening, `slow` listens
after a second. STUB_EXIT_RANK limits the exits to one rank. `download=N` is the download's status, `download=hang` one
that does not end. `paced` takes 10 ms for a step. STUB_LOG is a file that gets a line for each event.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from reference_server.transport.service import serving
from tests.support.wire.blocking_shard import compute_thread
from tests.support.wire.scripted_shard import ScriptedShard, say


def note(event: str) -> None:
    with Path(os.environ["STUB_LOG"]).open("a") as log:
        log.write(f"{event} {os.getpid()}\n")


class _ListeningShard(ScriptedShard):
    """Logs each call of Health."""

    asked: asyncio.Event

    async def health(self) -> None:
        self.asked.set()


async def paced(_: str) -> None:
    await asyncio.sleep(0.01)


async def serve(prefix: str, orders: dict[str, str]) -> int:
    rank = os.environ["RANK"]
    stopped = asyncio.Event()

    def stop() -> None:
        note(f"shard-{rank}-sigterm")
        if "deaf" not in orders:
            stopped.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    url = f"unix://{prefix}-{rank}"
    shard = _ListeningShard(say("x"), gate=paced if "paced" in orders else None)
    shard.asked = asyncio.Event()
    if "slow" in orders:
        await asyncio.sleep(1)
    with compute_thread(shard) as thread:
        async with serving(shard, url, [url], thread):
            return await listen(rank, shard, stopped, orders)


async def listen(rank: str, shard: _ListeningShard, stopped: asyncio.Event, orders: dict[str, str]) -> int:
    record = {"text": f"stub {rank} listens\n", "record": {"level": {"name": "SUCCESS"}}}
    print(json.dumps(record), flush=True)
    note(f"shard-{rank}-serving")
    if "exit" in orders and rank == os.environ.get("STUB_EXIT_RANK", rank):
        await shard.asked.wait()
        await asyncio.sleep(0.5)
        print("the stub was told to leave", file=sys.stderr)
        return int(orders["exit"])
    await stopped.wait()
    return 0


def main() -> int:
    orders = dict(part.partition("=")[::2] for part in os.environ.get("STUB_SHARD", "").split(",") if part)
    if sys.argv[1] == "download-weights":
        note("download")
        print("the hub is closed", file=sys.stderr)
        if orders.get("download") == "hang":
            signal.pause()
        return int(orders.get("download", "0"))
    note(f"shard-{os.environ['RANK']}-start")
    if "early" in orders and os.environ["RANK"] == os.environ.get("STUB_EXIT_RANK", os.environ["RANK"]):
        print("no memory left", file=sys.stderr)
        return int(orders["early"])
    return asyncio.run(serve(sys.argv[sys.argv.index("--uds-path") + 1], orders))


if __name__ == "__main__":
    sys.exit(main())
