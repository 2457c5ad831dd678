"""Calibration: a launch for each way to hold the weights, a sweep of designed steps in it, and the traces they leave.

Bursts of prompts of one length, then batches that decode at one context. What was really batched is read from the
trace, so a burst need not be met exactly.
"""

import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.datasets.vocabulary import CANDIDATES
from loadgen.errors import TargetError
from loadgen.progress import Progress
from loadgen.target import LaunchedTarget, Target
from reference_server.config import ServerConfig
from tuner.config import ServerSection
from tuner.device_lock import device_lock
from tuner.evaluate import SERVER_LOG, STEPS_FILE
from tuner.space import server_config
from tuner.steptrace import Steps, TraceError, read_facts, read_steps
from tuner.targets import launch_of, remove_container

PROMPTS, LENGTHS = (1, 2, 4, 8, 16), (64, 256, 1024)
ROWS, CONTEXTS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 128, 192), (128, 512, 1500)
REPEATS = 3
SWEEP_S = 30.0
# Until the head of a trace is in its file.
HEAD_S = 10.0
# Tokens of an answer: one of a prefill burst, some decode steps of a batch.
FIRST_TOKEN, DECODED = 1, 8
ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests sent at once."""

    count: int
    input_tokens: int
    output_tokens: int


def designed(budget: int, pool: int, longest_input: int, most_requests: int, *, seed: int = 0) -> list[Burst]:
    """The bursts that budget, pool and limits allow, shuffled, `REPEATS` times over.

    So a sweep that is ended early has seen some of everything.

    >>> len(designed(4096, 20_000, 1024, 128)) // REPEATS
    34
    """
    lengths = sorted({min(length, longest_input) for length in (*LENGTHS, longest_input)})
    bursts = [
        Burst(count, length, FIRST_TOKEN)
        for count in PROMPTS
        for length in lengths
        if count * length <= budget and count <= most_requests
    ]
    contexts = sorted({min(context, longest_input) for context in CONTEXTS})
    bursts += [
        Burst(rows, context, DECODED)
        for rows in ROWS
        for context in contexts
        if rows * (context + DECODED) <= pool and rows <= most_requests
    ]
    rng = random.Random(seed)
    return [burst for _ in range(REPEATS) for burst in rng.sample(bursts, len(bursts))]


def calibrate(
    server: ServerSection, launches: Sequence[Mapping[str, Any]], folder: Path, progress: Progress
) -> list[Steps]:
    """Launch each setting, sweep it, and read its trace. Raises LoadgenError where one does not start."""
    found = []
    for number, settings in enumerate(launches):
        directory = folder / f"{number:02d}"
        directory.mkdir(parents=True, exist_ok=True)
        trace = directory.resolve() / STEPS_FILE
        progress.say(f"calibrating, launch {number + 1} of {len(launches)}: {settings.get('quantize') or 'as it is'}")
        _sweep(server, server_config({**settings, "step_trace": trace}), directory, trace)
        steps = read_steps(trace)
        progress.say(f"  {len(steps)} steps")
        found.append(steps)
    return found


def _sweep(server: ServerSection, config: ServerConfig, directory: Path, trace: Path) -> None:
    launch = launch_of(server, config, directory)
    try:
        with (
            device_lock(server.gpus, lambda _: None),
            LaunchedTarget(
                launch.command,
                directory / SERVER_LOG,
                ready_timeout_s=server.ready_timeout_s,
                environment=launch.environment,
            ) as target,
        ):
            options = _facts_of(trace)["scheduler"]
            info = target.info()
            longest = min(int(info["max_input_tokens"]), int(info["max_total_tokens"]) - DECODED)
            bursts = designed(
                int(options["max_batch_prefill_tokens"]),
                int(options["max_batch_total_tokens"]),
                longest,
                int(info["max_concurrent_requests"]),
            )
            _play(target, bursts)
    finally:
        remove_container(launch.container)


def _facts_of(trace: Path) -> Mapping[str, Any]:
    """The head of a trace whose server has just come up: it is written from a thread of its own."""
    deadline_s = time.monotonic() + HEAD_S
    while True:
        try:
            return read_facts(trace)
        except TraceError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def _play(target: Target, bursts: Sequence[Burst]) -> None:
    """Send one burst after the other, for as long as a sweep may take."""
    rng = random.Random(0)
    deadline_s = time.monotonic() + SWEEP_S
    with ThreadPoolExecutor(max(burst.count for burst in bursts)) as threads:
        for burst in bursts:
            if time.monotonic() > deadline_s:
                return
            bodies = [_body(burst, rng) for _ in range(burst.count)]
            list(threads.map(lambda body: _post(target, body), bodies))


def _body(burst: Burst, rng: random.Random) -> bytes:
    """A prompt of words of its own, cut to its length by the server."""
    text = " ".join(rng.choices(CANDIDATES, k=burst.input_tokens))
    parameters = {
        "truncate": burst.input_tokens,
        "max_new_tokens": burst.output_tokens,
        "ignore_eos_token": True,
        "do_sample": False,
    }
    return json.dumps({"inputs": text, "parameters": parameters}).encode()


def _post(target: Target, body: bytes) -> None:
    control = target.control()
    try:
        status, _ = control.post("/generate", body, timeout_s=ANSWER_TIMEOUT_S)
    finally:
        control.close()
    if status != 200:
        raise TargetError(f"a calibrating request was answered with status {status}", status)
