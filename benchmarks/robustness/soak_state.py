"""The state of the soaked server while it is idle: gauges, memory, descriptors and processes."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.robustness.soak_clients import SoakedServer, exchange

BUSY_GAUGES = ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens")
FREE_BLOCKS = "tgi_free_blocks"
SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class IdleState:
    """The state of the idle server. `gauges` are 0 without requests; cached prefixes count as free blocks."""

    resident_bytes: int
    descriptors: int
    processes: int
    free_blocks: int
    gauges: dict[str, float]


async def settled(server: SoakedServer, pid: int) -> IdleState:
    """The state after the last request has ended, at the latest after `SETTLE_S` seconds."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        # The connections of the last requests still have to close.
        await asyncio.sleep(2)
        reading = await read_state(server, pid)
        if not any(reading.gauges.values()) or time.monotonic() > end_s:
            return reading


async def read_state(server: SoakedServer, pid: int) -> IdleState:
    text = (await exchange(server, "GET", "/metrics", None)).content.decode()
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in text.splitlines()) if
              name in (*BUSY_GAUGES, FREE_BLOCKS)}  # fmt: skip
    pids = family(pid)
    return IdleState(
        resident_bytes=sum(map(resident_bytes, pids)),
        descriptors=sum(map(num_descriptors, pids)),
        processes=len(pids),
        free_blocks=int(values.pop(FREE_BLOCKS)),
        gauges=values,
    )


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found


def resident_bytes(pid: int) -> int:
    """Anonymous resident memory of a process; pages of files depend on the load of the machine."""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split(maxsplit=1)[0])
    return 0


def num_descriptors(pid: int) -> int:
    with suppress(OSError):
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0
