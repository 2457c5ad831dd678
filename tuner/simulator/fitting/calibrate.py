"""Calibration: launches a server for each `quantize` value, sends designed bursts, and reads its step trace.

Some bursts are prompts of one length, others are requests that decode at one context length. The trace has the batches
that the server formed, which can differ from the bursts. A server with LoRA adapters gets bursts that use them.
"""

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.progress import ProgressDisplay
from tuner.errors import TraceError
from tuner.servers.launch_command import remove_container
from tuner.servers.tuned_server import TunedServer
from tuner.simulator.fitting.traced_steps import TracedSteps, read_facts, read_steps
from tuner.trial.device_lock import device_lock
from tuner.trial.evaluate import SERVER_LOG, STEPS_FILE
from tuner.trial.request_bursts import DECODED, FIRST_TOKEN, ProbeBurst, send_bursts

PROMPTS, LENGTHS = (1, 2, 4, 8, 16), (64, 256, 1024)
ROWS, CONTEXTS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 128, 192), (128, 512, 1500)
# Rows of decode batches with adapters, their context, and the prompts of prefill bursts with adapters.
ADAPTED_ROWS, ADAPTED_CONTEXT, ADAPTED_PROMPTS = (1, 4, 16, 32), 128, (1, 4)
ADAPTER_COUNTS = (1, 2, 4, 8, 16)
REPEATS = 3
SWEEP_S = 30.0
# Time limit until the head of a trace is written.
HEAD_S = 10.0


def designed(
    budget: int, pool: int, longest_input: int, most_requests: int, *, adapters: int = 0, seed: int = 0
) -> list[ProbeBurst]:
    """The bursts that fit in budget, pool and limits, `REPEATS` times, each time in random order.

    budget: prefill tokens of a batch. pool: K/V tokens. adapters: number of the server's. With random order, a sweep
    that ends early has a sample of all bursts.

    >>> len(designed(4096, 20_000, 1024, 128)) // REPEATS
    34
    """
    lengths = sorted({min(length, longest_input) for length in (*LENGTHS, longest_input)})
    bursts = [
        ProbeBurst(count, length, FIRST_TOKEN)
        for count in PROMPTS
        for length in lengths
        if count * length <= budget and count <= most_requests
    ]
    contexts = sorted({min(context, longest_input) for context in CONTEXTS})
    bursts += [
        ProbeBurst(rows, context, DECODED)
        for rows in ROWS
        for context in contexts
        if rows * (context + DECODED) <= pool and rows <= most_requests
    ]
    bursts += _adapted(budget, pool, longest_input, most_requests, adapters)
    rng = random.Random(seed)
    return [burst for _ in range(REPEATS) for burst in rng.sample(bursts, len(bursts))]


def _adapted(budget: int, pool: int, longest_input: int, most_requests: int, adapters: int) -> list[ProbeBurst]:
    """Bursts of 1, 2, 4, ... different adapters, each in batches of several sizes."""
    context = min(ADAPTED_CONTEXT, longest_input)
    counts = [count for count in ADAPTER_COUNTS if count <= adapters]
    decodes = [rows for rows in ADAPTED_ROWS if rows * (context + DECODED) <= pool and rows <= most_requests]
    prefills = [count for count in ADAPTED_PROMPTS if count * context <= budget and count <= most_requests]
    return [
        ProbeBurst(rows, context, output, count)
        for output, sizes in ((DECODED, decodes), (FIRST_TOKEN, prefills))
        for rows in sizes
        for count in counts
        if count <= rows
    ]


def run_calibration(
    server: TunedServer, launches: Sequence[Mapping[str, Any]], folder: Path, progress: ProgressDisplay
) -> list[TracedSteps]:
    """Launch each configuration, send the bursts, read its trace. Raises LoadgenError if a server does not start."""
    found = []
    for number, settings in enumerate(launches):
        directory = folder / f"{number:02d}"
        directory.mkdir(parents=True, exist_ok=True)
        trace = directory.resolve() / STEPS_FILE
        progress.show(
            f"calibration launch {number + 1} of {len(launches)}: quantize {settings.get('quantize') or 'none'}"
        )
        _sweep(server, settings, directory, trace)
        steps = read_steps(trace)
        progress.show(f"  {len(steps)} steps")
        found.append(steps)
    return found


def _sweep(server: TunedServer, settings: Mapping[str, Any], directory: Path, trace: Path) -> None:
    section, launch = server.section, server.launch(settings, directory, trace)
    try:
        with (
            device_lock(section.gpus, lambda _: None),
            launch.target(directory / SERVER_LOG, section.ready_timeout_s) as target,
        ):
            options = _facts_of(trace)["scheduler"]
            info = target.info()
            names = tuple(info.get("engine", {}).get("adapters", ()))
            longest = min(int(info["max_input_tokens"]), int(info["max_total_tokens"]) - DECODED)
            bursts = designed(
                int(options["max_batch_prefill_tokens"]),
                int(options["max_batch_total_tokens"]),
                longest,
                int(info["max_concurrent_requests"]),
                adapters=len(names),
            )
            send_bursts(target, bursts, SWEEP_S, names)
    finally:
        remove_container(launch.container)


def _facts_of(trace: Path) -> Mapping[str, Any]:
    """The facts in the head of a trace. The server writes it in a thread after its start."""
    deadline_s = time.monotonic() + HEAD_S
    while True:
        try:
            return read_facts(trace)
        except TraceError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
