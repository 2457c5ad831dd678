"""A launched server under misbehaving clients: `python -m benchmarks.robustness.soak --minutes 30`.

A third of the streams disconnects. At the same time there are probes of `/health` at a fixed rate, slow readers,
prompts of 2 MB and hostile grammars. The wait of a stream is a gap minus the median gap of a phase without the other
clients. Writes `benchmarks/results/soak.json`. Exit code 1 if a stream waits too long, or if a count does not return to
its value of the idle server.
"""

import argparse
import asyncio
import itertools
import json
import random
import secrets
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.robustness.soak_client import SoakedServer, exchange, free_port, hold, stream
from loadgen.target.machine import describe_machine

RESULT = Path(__file__).parents[1] / "results" / "soak.json"
STREAMS, SLOW_READERS, HEALTH_PER_S = 6, 4, 200
WARM_S, QUIET_S, READY_S, SETTLE_S = 30.0, 20.0, 300.0, 60.0
MAX_WAIT_S, PERCENTILE = 0.3, 0.999
ALLOWED_GROWTH_BYTES, ALLOWED_DESCRIPTORS = 64 << 20, 4
GAUGES = ("tgi_queue_size", "tgi_batch_current_size")
HOSTILE = ("((a+)+)+b", "(a{1,900}){1,900}", "(", "[" * 500, "(a|b|ab){4000}", "a{1,60000}")
LONG = "word " * 395_000
"""Below the payload limit of 2,000,000 bytes."""


@dataclass(frozen=True, slots=True)
class IdleState:
    """The state of the idle server."""

    resident_bytes: int
    descriptors: int
    processes: int
    gauges: dict[str, float]


@dataclass(slots=True)
class PhaseCounts:
    """The answers of one phase, and the gaps between the tokens of its streams, in seconds."""

    statuses: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="Length of the loaded phase. Default 30.")
    parser.add_argument("--seed", type=int, help="Default a new one, which is printed.")
    parser.add_argument("--out", type=Path, default=RESULT, help="File for the figures.")
    args = parser.parse_args()
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    found = asyncio.run(soak(args.minutes * 60, seed))
    args.out.write_text(json.dumps({"seed": seed, "machine": describe_machine(), **found}, indent=2) + "\n")
    print(json.dumps(found, indent=2), flush=True)
    return 1 if found["failed"] else 0


async def soak(seconds: float, seed: int) -> dict[str, object]:
    """Launch the server, load it and return the figures; `failed` lists the missed gates."""
    address = SoakedServer("127.0.0.1", free_port())
    process = launch(address)
    try:
        await ready(address, process)
        chance = random.Random(seed)
        # The idle state is read after a first load, so that it includes grammar caches and the allocator's peak.
        warm = await phase(address, WARM_S, chance, disturb=True)
        before = await settled(address, process.pid)
        quiet = await phase(address, QUIET_S, chance, disturb=False)
        loaded = await phase(address, seconds, chance, disturb=True)
        after = await settled(address, process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(120)
        process.kill()
        process.wait()
    assert warm.gaps_s, "the server sent no tokens"
    own_s = quantile(quiet.gaps_s, 0.5)
    waits = sorted(max(0.0, gap - own_s) for gap in loaded.gaps_s)
    return {
        "seconds": seconds,
        "statuses": dict(sorted(loaded.statuses.items())),
        "own_gap_ms": own_s * 1e3,
        "quiet_wait_p999_ms": (quantile(quiet.gaps_s, PERCENTILE) - own_s) * 1e3,
        "tokens": len(waits),
        "wait_p99_ms": quantile(waits, 0.99) * 1e3,
        "wait_p999_ms": quantile(waits, PERCENTILE) * 1e3,
        "wait_max_ms": waits[-1] * 1e3,
        "health_probes": len(loaded.health_s),
        "health_p99_ms": quantile(loaded.health_s, 0.99) * 1e3,
        "before": asdict(before),
        "after": asdict(after),
        "failed": missed_gates(quantile(waits, PERCENTILE), before, after),
    }


def launch(address: SoakedServer) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "reference_server.launcher.cli", "--model-id", "preset:tiny-llama"]
    command += ["--hostname", address.host, "--port", str(address.port), "--cpu-memory-gib", "0.5"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def missed_gates(wait_s: float, before: IdleState, after: IdleState) -> list[str]:
    """The gates that the figures miss, with the limit of each."""
    gates = {
        f"wait of streams at p99.9: {wait_s * 1e3:.0f} ms, limit {MAX_WAIT_S * 1e3:.0f} ms": wait_s > MAX_WAIT_S,
        f"gauges are not 0: {after.gauges}": any(after.gauges.values()),
        f"descriptors: {after.descriptors}, before {before.descriptors}": after.descriptors
        > before.descriptors + ALLOWED_DESCRIPTORS,
        f"processes: {after.processes}, before {before.processes}": after.processes > before.processes,
        f"memory: {after.resident_bytes >> 20} MiB, before {before.resident_bytes >> 20} MiB": after.resident_bytes
        > before.resident_bytes + ALLOWED_GROWTH_BYTES,
    }
    return [gate for gate, is_missed in gates.items() if is_missed]


def quantile(values: list[float], share: float) -> float:
    """The smallest value that is at least as large as the fraction `share` of all values.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


async def phase(address: SoakedServer, seconds: float, chance: random.Random, *, disturb: bool) -> PhaseCounts:
    """Run streams for `seconds`; with `disturb`, together with all clients that must not delay them."""
    counts, end_s = PhaseCounts(), time.monotonic() + seconds
    jobs = [streams(address, counts, random.Random(chance.random()), end_s, leave=disturb) for _ in range(STREAMS)]
    if disturb:
        jobs.append(health(address, counts, end_s))
        jobs.append(hostile(address, counts, random.Random(chance.random()), end_s))
        jobs += [slow_reader(address, counts, end_s) for _ in range(SLOW_READERS)]
    await asyncio.gather(*jobs)
    return counts


async def streams(
    address: SoakedServer, counts: PhaseCounts, chance: random.Random, end_s: float, *, leave: bool
) -> None:
    """Run one stream after another; with `leave`, a third of them disconnects at a random token."""
    while time.monotonic() < end_s:
        body = {
            "inputs": "the server " * chance.choice((1, 8, 40)),
            "parameters": {"max_new_tokens": chance.randint(8, 120), "ignore_eos_token": True},
        }
        leave_after = chance.randint(1, 40) if leave and chance.random() < 1 / 3 else None
        status, times_s = await stream(address, body, leave_after)
        counts.statuses[f"stream {'left' if leave_after is not None else status}"] += 1
        counts.gaps_s += [later - earlier for earlier, later in itertools.pairwise(times_s)]


async def health(address: SoakedServer, counts: PhaseCounts, end_s: float) -> None:
    """Send probes at a fixed rate, each on its own connection, so that a late answer delays no other probe."""

    async def probe() -> None:
        start_s = time.monotonic()
        status = await exchange(address, "GET", "/health", None)
        counts.health_s.append(time.monotonic() - start_s)
        counts.statuses[f"health {status}"] += 1

    async with asyncio.TaskGroup() as group:
        due_s = time.monotonic()
        while due_s < end_s:
            group.create_task(probe())
            due_s += 1 / HEALTH_PER_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def hostile(address: SoakedServer, counts: PhaseCounts, chance: random.Random, end_s: float) -> None:
    """Send prompts of 2 MB and grammars that are too large or malformed, one after another."""
    while time.monotonic() < end_s:
        if chance.random() < 0.3:
            body: dict[str, object] = {"inputs": LONG}
        else:
            grammar = {"type": "regex", "value": chance.choice(HOSTILE)}
            body = {"inputs": "a", "parameters": {"max_new_tokens": 4, "grammar": grammar}}
        status = await exchange(address, "POST", "/generate", body)
        counts.statuses[f"{'prompt of 2 MB' if 'parameters' not in body else 'grammar'} {status}"] += 1
        await asyncio.sleep(0.2)


async def slow_reader(address: SoakedServer, counts: PhaseCounts, end_s: float) -> None:
    """Send requests and read their answers at 3 KB/s."""
    body = {"inputs": "the server", "parameters": {"max_new_tokens": 200, "ignore_eos_token": True}}
    while time.monotonic() < end_s:
        await hold(address, body, end_s)
        counts.statuses["slow reader"] += 1


async def ready(address: SoakedServer, process: "subprocess.Popen[bytes]") -> None:
    async with asyncio.timeout(READY_S):
        while process.poll() is None:
            if await exchange(address, "GET", "/health", None) == 200:
                return
            await asyncio.sleep(0.5)
    raise RuntimeError(f"the server ended with {process.returncode}")


async def settled(address: SoakedServer, pid: int) -> IdleState:
    """The state after the last request has ended, at the latest after `SETTLE_S` seconds."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        # The connections of the last requests still have to close.
        await asyncio.sleep(2)
        reading = await read_state(address, pid)
        if not any(reading.gauges.values()) or time.monotonic() > end_s:
            return reading


async def read_state(address: SoakedServer, pid: int) -> IdleState:
    text: list[bytes] = []
    await exchange(address, "GET", "/metrics", None, text)
    lines = [line.rpartition(" ") for line in b"".join(text).decode().splitlines()]
    gauges = {name: float(value) for name, _, value in lines if name in GAUGES}
    pids = family(pid)
    return IdleState(sum(map(resident_bytes, pids)), sum(map(num_descriptors, pids)), len(pids), gauges)


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


if __name__ == "__main__":
    sys.exit(main())
