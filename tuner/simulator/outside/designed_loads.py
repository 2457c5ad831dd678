"""Designs and measures the loads for a calibration with client timings.

There are single prompts of several lengths, rounds of equal requests at growing concurrency, prompts with short
outputs, and mixes of lengths. Each load is a closed loop with requests of forced length. The load generator measures
it.
"""

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadgen import runner
from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.progress import ProgressDisplay
from loadgen.target.target import Target
from tuner.simulator.outside.client_run import ClientRun

REPEATS = 3
SHORT_INPUT, DECODED = 16, 48
# Output tokens of the loads that mostly prefill. One token is not enough: the first token of some servers has no text
# and no event.
PREFILLED = 4
# Requests of each user of a load, and requests of the load with one user.
ROUNDS, LONE_REQUESTS = 4, 30
FEWEST_TOKENS, FEWEST_USERS = 160, 2
LENGTHS_FILE = "lengths.csv"


@dataclass(frozen=True, slots=True)
class DesignedLoad:
    """A closed loop of `users`. Each request has a random one of `lengths`, which are input and output tokens."""

    name: str
    users: int
    lengths: tuple[tuple[int, int], ...]
    requests: int


def designed_loads(most_users: int, most_tokens: int) -> list[DesignedLoad]:
    """The loads with at most `most_users` users and `most_tokens` prompt and output tokens. Raises UsageError.

    >>> [load.name for load in designed_loads(4, 512)]
    ['lone', 'decode-2', 'decode-4', 'context-2', 'prefill-2', 'prefill-4', 'mixed-2', 'mixed-4']
    """
    if most_users < FEWEST_USERS:
        raise UsageError(f"--users is {most_users}, but at least {FEWEST_USERS} are needed")
    if most_tokens < FEWEST_TOKENS:
        raise UsageError(f"--max-total-tokens is {most_tokens}, but at least {FEWEST_TOKENS} are needed")
    return list(_loads(_doubled(most_users), most_tokens - DECODED))


def _loads(users: list[int], longest: int) -> Iterator[DesignedLoad]:
    middle = longest // 3
    yield DesignedLoad("lone", 1, ((SHORT_INPUT, DECODED), (middle, 16), (longest, 24)), LONE_REQUESTS)
    for each in users:
        yield DesignedLoad(f"decode-{each}", each, ((SHORT_INPUT, DECODED),), ROUNDS * each)
    yield DesignedLoad(f"context-{users[0]}", users[0], ((longest, DECODED),), 5 * users[0])
    for each in dict.fromkeys((users[0], users[len(users) // 2])):
        yield DesignedLoad(f"prefill-{each}", each, ((longest, PREFILLED), (middle, PREFILLED)), 8 * each)
    for each in sorted(users[::-2][:2]) if len(users) > 2 else users:
        lengths = ((SHORT_INPUT, 8), (middle, 24), (longest, 16), (2 * middle, DECODED))
        yield DesignedLoad(f"mixed-{each}", each, lengths, max(6 * each, 24))


def _doubled(most: int) -> list[int]:
    """2, 4, 8 and so on, and `most` as the last number.

    >>> _doubled(24)
    [2, 4, 8, 16, 24]
    """
    found = []
    users = FEWEST_USERS
    while users < most:
        found.append(users)
        users *= 2
    return [*found, most]


def measure_loads(
    loads: list[DesignedLoad], target: Target, base: BenchConfig, folder: Path, progress: ProgressDisplay
) -> list[ClientRun]:
    """Measure every load `REPEATS` times, each time in random order.

    Raises UsageError if the server cannot force lengths or if the folder has runs, MeasurementError if a request fails
    or an answer has a wrong length.
    """
    rng = random.Random(base.seed)
    order = [(load, repeat) for repeat in range(REPEATS) for load in rng.sample(loads, len(loads))]
    found = []
    for number, (load, repeat) in enumerate(order):
        directory = folder / f"{load.name}-{repeat}"
        progress.show(f"load {number + 1} of {len(order)}: {load.name}")
        runner.measure(_config(load, base, folder, number), target, directory)
        found.append(ClientRun.read(directory, load.name))
    return found


def _config(load: DesignedLoad, base: BenchConfig, folder: Path, seed: int) -> BenchConfig:
    lengths = folder / f"{load.name}-{LENGTHS_FILE}"
    lengths.parent.mkdir(parents=True, exist_ok=True)
    with lengths.open("w", newline="") as file:
        csv.writer(file).writerows([("input_tokens", "output_tokens"), *load.lengths])
    values = {
        **base.model_dump(exclude_unset=True),
        "workload": "synthetic",
        "concurrency": load.users,
        "requests": load.requests,
        "length_pairs": str(lengths),
        "length_control": "forced",
        "prefix_cache": "cold",
        "warmup": 0.0,
        "seed": base.seed + seed,
    }
    return parsing.load(BenchConfig, values)
