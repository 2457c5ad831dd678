"""Converts a load file of `tgi-bench` to a simulated load.

Its requests have the same lengths as those of `tgi-bench run`. They have token ids only if prompts share prefixes.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.config.workload_settings import FILE_WORKLOADS
from loadgen.workloads.adapter_mix import AdapterMix
from loadgen.workloads.prompts.prompt import Prompt, ServerLimits
from loadgen.workloads.prompts.vocabulary import Vocabulary, Word
from loadgen.workloads.think_time import parse_think_time
from loadgen.workloads.workload import build
from tuner.errors import NotSimulatedError
from tuner.simulator.fitting.client_cost import NO_COST, ClientCost
from tuner.simulator.simulation import NS_PER_S, PlannedRequest, SimulatedLoad

# Workloads whose prompts share no prefix.
NOT_MODELLED = {"images": "images"}
UNSHARED_WORKLOADS = ("synthetic", "azure_llm", "burstgpt")


class LengthVocabulary(Vocabulary):
    """Writes the length and the key of each part of a prompt instead of words. Shared parts have equal keys."""

    def write(self, tokens: int, key: str) -> str:
        return f"{tokens}:{key}\n"

    def compose(self, parts: Any, tokens: int) -> list[str]:
        pieces: list[str] = []
        left = tokens
        for size, key in parts:
            take = min(left, size)
            if take > 0:
                pieces.append(f"{take}:{key}\n")
                left -= take
        return pieces


LENGTHS = LengthVocabulary(0, (Word("", 1),), (Word("", 1),), "")


def ids_of(text: str) -> tuple[int, ...]:
    """The token ids of a text of `LengthVocabulary`. Equal parts have equal ids.

    >>> ids_of("2:a\\n3:b\\n")[:2] == ids_of("5:a\\n")[:2]
    True
    """
    ids: list[int] = []
    for part in text.splitlines():
        tokens, _, key = part.partition(":")
        first = zlib.crc32(key.encode()) << 24
        ids += range(first, first + int(tokens))
    return tuple(ids)


def load_of(
    config: BenchConfig,
    *,
    limits: ServerLimits | None = None,
    with_ids: bool = False,
    requests: int | None = None,
    client: ClientCost = NO_COST,
) -> SimulatedLoad:
    """The simulated load of a load file. Raises NotSimulatedError for unknown prompt lengths and unsupported modes.

    requests: number of measured requests, instead of the duration. client: time of a request outside model steps, and
    tokens that the server adds to prompts without ids.
    """
    if config.workload in FILE_WORKLOADS:
        raise NotSimulatedError(
            f"workload `{config.workload}` is not simulated: the token counts of its prompts are unknown"
        )
    if name := next((name for name in NOT_MODELLED if getattr(config, name)), None):
        raise NotSimulatedError(
            f"`{name}` is not simulated: the cost of {NOT_MODELLED[name]} in a step is not measured"
        )
    if config.mode in ("sessions", "stages") and not (config.mode == "stages" and config.is_open_loop):
        raise NotSimulatedError(
            f"`mode` is {config.mode}, which is not simulated; use closed, constant, poisson, gamma, burst or trace"
        )
    think = parse_think_time(config.think_time, config.seed)
    if think.kind != "fixed":
        raise NotSimulatedError("`think_time` is a distribution, which is not simulated; set a fixed time")
    workload = build(config, LENGTHS, limits or ServerLimits())
    times_ns = workload.times_ns
    adapters = workload.adapters
    planned = (
        [_planned(prompt, adapters, with_ids, client.added_tokens) for prompt in workload.scheduled()]
        if times_ns is not None
        else None
    )
    duration_s = config.duration_s
    count = requests if requests is not None else config.requests
    return SimulatedLoad(
        planned
        if planned is not None
        else ClosedLoopRequests(workload.prompts, adapters, with_ids, client.added_tokens),
        times_ns=times_ns,
        users=0 if times_ns is not None else config.users,
        think_ns=round(think.first * NS_PER_S),
        warmup_ns=round(config.warmup_s * NS_PER_S),
        duration_ns=None if duration_s is None or requests is not None else round(duration_s * NS_PER_S),
        requests=count,
        client_ns=client.client_ns,
        tokenize_ns=client.tokenize_ns,
    )


def shares_prefixes(config: BenchConfig) -> bool:
    """Whether the prompts of a load can share a prefix."""
    return config.workload not in UNSHARED_WORKLOADS and config.prefix_cache != "cold"


@dataclass(frozen=True, slots=True)
class ClosedLoopRequests:
    """Requests of a closed loop, created on demand."""

    prompts: Any
    adapters: AdapterMix | None
    with_ids: bool
    added_tokens: int = 0

    def __iter__(self) -> Iterator[PlannedRequest]:
        return (_planned(prompt, self.adapters, self.with_ids, self.added_tokens) for prompt in self.prompts)


def _planned(prompt: Prompt, adapters: AdapterMix | None, with_ids: bool, added_tokens: int) -> PlannedRequest:
    adapter = None if adapters is None else adapters.of(prompt)
    if not with_ids:
        return PlannedRequest((prompt.input_tokens or 1) + added_tokens, prompt.output_tokens or 1, adapter=adapter)
    text = "".join(message["content"] for message in prompt.messages) if prompt.messages else prompt.text
    ids = ids_of(text)
    if adapter is not None:
        # Cached prefixes belong to one adapter.
        first = zlib.crc32(adapter.encode()) << 56
        ids = tuple(first + each for each in ids)
    return PlannedRequest(len(ids), prompt.output_tokens or 1, None, ids, adapter)
