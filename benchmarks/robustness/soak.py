"""A launched server under misbehaving clients: `python -m benchmarks.robustness.soak --minutes 30`.

A third of the streams disconnects. At the same time there are probes of `/health` at a fixed rate, slow readers,
prompts of 2 MB and hostile grammars. The wait of a stream for a token is the time since its last token, or since its
request was sent, minus the median of the same time on the server without the other clients. Writes
`benchmarks/results/soak.json` with the slowest stalls and their causes. Exit code 1 if a stream waits too long, if an
answer is not as expected, or if a count does not return to its value of the idle server.
"""

import argparse
import asyncio
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from benchmarks.robustness.core_times import CoreSampler, processes_by_name
from benchmarks.robustness.soak_clients import SoakedServer, exchange, free_port
from benchmarks.robustness.soak_load import OwnWork, PhaseCounts, phase
from benchmarks.robustness.soak_state import IdleState, family, read_state, settled
from benchmarks.robustness.stall_cause import StallEvidence, cause_of, read_steps
from loadgen.target.machine import describe_machine

RESULT = Path(__file__).parents[1] / "results" / "soak.json"
WARM_S, QUIET_S, READY_S = 30.0, 20.0, 300.0
MAX_WAIT_MS, PERCENTILE = 300.0, 0.999
ALLOWED_GROWTH_BYTES, ALLOWED_DESCRIPTORS = 64 << 20, 4
PROGRAMS = {
    "text-generation-router": "router",
    "router.cli": "router",
    "text-generation-server": "model server",
    "model_server.cli": "model server",
}
EXPECTED = ("stream whole", "stream left", "health 200", "slow reader", "prompt of 2 MB 422", "grammar 422",
            "grammar 424", "grammar 200")  # fmt: skip
"""A grammar that is only slow is answered by 200, a malformed one by 422 or 424."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="Length of the loaded phase. Default 30.")
    parser.add_argument("--seed", type=int, help="Random seed. Default a new one, which is printed.")
    parser.add_argument("--out", type=Path, default=RESULT, help="File for the figures.")
    args = parser.parse_args()
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    found = asyncio.run(soak(args.minutes * 60, seed))
    args.out.write_text(json.dumps({"seed": seed, "machine": describe_machine(), **found}, indent=2) + "\n")
    print(json.dumps(found, indent=2), flush=True)
    return 1 if found["failed"] else 0


async def soak(seconds: float, seed: int, *, warm_s: float = WARM_S, quiet_s: float = QUIET_S) -> dict[str, object]:
    """Launch the server, load it and return the figures; `failed` lists the missed gates."""
    server = SoakedServer("127.0.0.1", free_port())
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "steps.jsonl"
        process = launch(server, trace)
        try:
            await ready(server, process)
            fresh = await read_state(server, process.pid)
            chance = random.Random(seed)
            # The idle state is read after a first load, so that it includes grammar caches and the allocator's peak.
            await phase(server, warm_s, chance, disturb=True)
            before = await settled(server, process.pid)
            quiet = await phase(server, quiet_s, chance, disturb=False)
            own = own_work(quiet)
            with CoreSampler(processes_by_name(family(process.pid), PROGRAMS)) as cores:
                loaded = await phase(server, seconds, chance, disturb=True, own=own)
            after = await settled(server, process.pid)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(120)
            process.kill()
            process.wait()
        evidence = StallEvidence(read_steps(trace), cores.samples, loaded.slow_probes, loaded.others)
    causes = [asdict(cause_of(stall, evidence)) for stall in sorted(loaded.slowest, reverse=True)]
    waits = loaded.waits_ns
    return {
        "seconds": seconds,
        "statuses": dict(sorted(loaded.statuses.items())),
        "own_gap_ms": own.gap_ns / 1e6,
        "own_first_token_ms": {words: ns / 1e6 for words, ns in own.first_ns.items()},
        "quiet_wait_p999_ms": quantile_ms(quiet.gap_waits_ns, PERCENTILE) - own.gap_ns / 1e6,
        "tokens": len(waits),
        "wait_p99_ms": quantile_ms(waits, 0.99),
        "wait_p999_ms": quantile_ms(waits, PERCENTILE),
        "wait_max_ms": max(waits) / 1e6,
        "first_token_wait_p99_ms": quantile_ms([w for ws in loaded.first_waits_ns.values() for w in ws], 0.99),
        "client_late_p999_ms": quantile_ms(loaded.late_ns, PERCENTILE),
        "arrival_times": server.arrivals.to_json(),
        "health_probes": len(loaded.health_ns),
        "health_p99_ms": quantile_ms(loaded.health_ns, 0.99),
        "slowest": causes,
        "fresh": asdict(fresh),
        "before": asdict(before),
        "after": asdict(after),
        "failed": [
            *missed_waits(loaded, kernel_times=server.arrivals.to_json()["source"] == "kernel"),
            *unexpected_answers(loaded.statuses),
            *left_behind(fresh, before, after),
        ],
    }


def launch(server: SoakedServer, trace: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "reference_server.launcher.cli", "--model-id", "preset:tiny-llama"]
    command += ["--hostname", server.host, "--port", str(server.port), "--cpu-memory-gib", "0.5"]
    command += ["--step-trace", str(trace)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def own_work(quiet: PhaseCounts) -> OwnWork:
    """The medians of a phase without other clients."""
    assert quiet.gap_waits_ns, "the server sent no tokens"
    first_ns = {words: round(statistics.median(waits)) for words, waits in quiet.first_waits_ns.items() if waits}
    return OwnWork(round(statistics.median(quiet.gap_waits_ns)), first_ns)


def missed_waits(loaded: PhaseCounts, *, kernel_times: bool) -> list[str]:
    """The limit of waits if it is missed, or if the client read too late to decide."""
    wait_ms, late_ms = quantile_ms(loaded.waits_ns, PERCENTILE), quantile_ms(loaded.late_ns, PERCENTILE)
    missed = []
    if wait_ms > MAX_WAIT_MS:
        missed.append(f"wait of streams at p99.9: {wait_ms:.0f} ms, limit {MAX_WAIT_MS:.0f} ms")
    # Tokens that wait unread are merged and have the time of the last one.
    if late_ms > MAX_WAIT_MS:
        missed.append(f"waits are not decided: the client read {late_ms:.0f} ms late at p99.9")
    if not kernel_times:
        missed.append("waits are not decided: the kernel records no arrival times")
    return missed


def unexpected_answers(statuses: Counter[str]) -> list[str]:
    """The answers that no client should get."""
    return [f"answers: {number} times {name}" for name, number in sorted(statuses.items()) if name not in EXPECTED]


def left_behind(fresh: IdleState, before: IdleState, after: IdleState) -> list[str]:
    """The counts that did not return to those of the idle server, with the value of each. fresh: before any request."""
    grown_to = before.resident_bytes + ALLOWED_GROWTH_BYTES
    gates = {
        f"gauges are not 0: {after.gauges}": any(after.gauges.values()),
        f"free blocks: {after.free_blocks} of {fresh.free_blocks}": after.free_blocks != fresh.free_blocks,
        f"descriptors: {after.descriptors}, before {before.descriptors}": after.descriptors
        > before.descriptors + ALLOWED_DESCRIPTORS,
        f"processes: {after.processes}, before {before.processes}": after.processes > before.processes,
        f"memory: {after.resident_bytes >> 20} MiB, before {before.resident_bytes >> 20} MiB": after.resident_bytes
        > grown_to,
    }
    return [gate for gate, is_missed in gates.items() if is_missed]


def quantile_ms(values_ns: Sequence[int], share: float) -> float:
    """The smallest value that is at least as large as the fraction `share` of all values, in ms.

    >>> quantile_ms([4_000_000, 1_000_000, 3_000_000, 2_000_000], 0.5)
    2.0
    """
    ordered = sorted(values_ns)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)] / 1e6


async def ready(server: SoakedServer, process: "subprocess.Popen[bytes]") -> None:
    async with asyncio.timeout(READY_S):
        while process.poll() is None:
            if (await exchange(server, "GET", "/health", None)).status == 200:
                return
            await asyncio.sleep(0.5)
    raise RuntimeError(f"the server ended with {process.returncode}")


if __name__ == "__main__":
    sys.exit(main())
