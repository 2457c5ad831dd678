"""A configuration and a load file -> a simulated run: what connects the simulator to the product's own files.

The load's prompts are those that `tgi-bench run` would send; of a text only its length and what it shares matters.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from loadgen.config import BenchConfig
from loadgen.datasets.prompt import Limits, Prompt
from loadgen.datasets.vocabulary import Vocabulary, Word
from loadgen.modes import FILE_WORKLOADS
from loadgen.think_time import parse_think_time
from loadgen.workload import build
from reference_server.router.scheduler import SchedulerOptions, Schema
from tuner.clientcost import NO_COST, ClientCost
from tuner.costmodel import CostModel
from tuner.errors import TunerError
from tuner.simulate import NS_PER_S, Ask, Load, Simulated, Simulation
from tuner.simulated_metrics import metrics_of

NOT_MODELLED = ("lora_adapters", "speculate", "num_shard")
GIB = 2**30
OPTION_NAMES = tuple(each.name for each in fields(SchedulerOptions))
MAX_CONCURRENT = 128
# Workloads whose prompts share no beginning: a prefix cache finds nothing in them, and what it holds can be evicted.
UNSHARED_WORKLOADS = ("synthetic", "azure_llm", "burstgpt")


class ForecastError(TunerError):
    """A configuration or a load that the simulator does not model."""

    exit_code = 2


class Lengths(Vocabulary):
    """Writes no words: each part of a text stands for itself, so that what prompts share can be told."""

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


LENGTHS = Lengths(0, (Word("", 1),), (Word("", 1),), "")


def ids_of(text: str) -> tuple[int, ...]:
    """Token ids of a text that `Lengths` wrote: equal parts have equal ids.

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
    limits: Limits | None = None,
    with_ids: bool = False,
    requests: int | None = None,
    client: ClientCost = NO_COST,
) -> Load:
    """The load of a file, in virtual time. Raises ForecastError for one whose prompts have no known length."""
    if config.workload in FILE_WORKLOADS:
        raise ForecastError(f"workload `{config.workload}` is not simulated: its texts have no known token counts")
    if config.mode in ("sessions", "stages") and not (config.mode == "stages" and config.is_open_loop):
        raise ForecastError(
            f"mode `{config.mode}` is not simulated; use closed, constant, poisson, gamma, burst or trace"
        )
    think = parse_think_time(config.think_time, config.seed)
    if think.kind != "fixed":
        raise ForecastError("`think_time` as a distribution is not simulated; give one time")
    workload = build(config, LENGTHS, limits or Limits())
    times_ns = workload.times_ns
    asks = list(map(_with_ids if with_ids else _plain, workload.scheduled())) if times_ns is not None else None
    duration_s = config.duration_s
    count = requests if requests is not None else config.requests
    return Load(
        asks if asks is not None else Endless(workload.prompts, with_ids),
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
    """Whether a prefix cache can find anything in the load's prompts."""
    return config.workload not in UNSHARED_WORKLOADS and config.prefix_cache != "cold"


@dataclass(frozen=True, slots=True)
class Endless:
    """Prompts of a closed loop, made as they are asked for."""

    prompts: Any
    with_ids: bool

    def __iter__(self) -> Iterator[Ask]:
        return map(_with_ids if self.with_ids else _plain, self.prompts)


def _plain(prompt: Prompt) -> Ask:
    return Ask(prompt.input_tokens or 1, prompt.output_tokens or 1)


def _with_ids(prompt: Prompt) -> Ask:
    text = "".join(message["content"] for message in prompt.messages) if prompt.messages else prompt.text
    ids = ids_of(text)
    return Ask(len(ids), prompt.output_tokens or 1, None, ids)


@dataclass(frozen=True, slots=True)
class Server:
    """What a launch told of itself: the Scheduler's options, its settings, and the memory that it found."""

    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    memory: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Server":
        """The facts of a step trace. Raises ForecastError."""
        options = facts.get("scheduler")
        if not isinstance(options, Mapping) or any(name not in OPTION_NAMES for name in options):
            raise ForecastError("the step trace does not say how its server was set up")
        told = {name: each.get("value") for name, each in facts.get("settings", {}).items()}
        return cls(dict(options), told, dict(facts.get("engine", {}).get("memory") or {}))

    def with_settings(self, settings: Mapping[str, Any], pool: "Pool | None" = None) -> "Server":
        """The same server under other settings; the cache follows the memory that they leave."""
        if unmodelled := [name for name in NOT_MODELLED if settings.get(name) not in (None, 0, 1, "", (), [], "none")]:
            raise ForecastError(f"`{unmodelled[0]}` is not simulated")
        known = {name: settings[name] for name in OPTION_NAMES if settings.get(name) is not None}
        options = {**self.options, **known}
        if "prefill_chunking" in settings:
            options["supports_chunking"] = bool(settings["prefill_chunking"])
        if settings.get("prefix_caching") is not None:
            options["use_prefix_caching"] = bool(settings["prefix_caching"])
        if pool is not None and "max_batch_total_tokens" not in known:
            given = {name: value for name, value in settings.items() if value is not None}
            budget = {"max_batch_prefill_tokens": options["max_batch_prefill_tokens"]}
            options["max_batch_total_tokens"] = pool.tokens({**self.settings, **given, **budget})
        return Server(options, {**self.settings, **settings}, self.memory)

    def for_load(self, config: BenchConfig) -> "Server":
        """The same server; a prefix cache that can find nothing is left out, which changes no decision."""
        if shares_prefixes(config):
            return self
        return Server({**self.options, "use_prefix_caching": False}, self.settings, self.memory)

    @property
    def scheduler_options(self) -> SchedulerOptions:
        return SchedulerOptions(**{**self.options, "schema": Schema(self.options.get("schema", Schema.V3))})

    @property
    def max_concurrent_requests(self) -> int:
        return int(self.settings.get("max_concurrent_requests") or MAX_CONCURRENT)


@dataclass(frozen=True, slots=True)
class Pool:
    """Tokens of K/V that fit, from what launches found: each scheme's own level, less what larger prefills take.

    `per_share` are tokens for the whole of the memory, `per_prefill_token` those that one token of budget costs under
    each scheme.
    """

    levels: Mapping[str, float]
    per_share: float
    per_prefill_token: Mapping[str, float]

    @classmethod
    def of(cls, servers: Sequence[Server]) -> "Pool":
        """The pool of launches, from the bytes that each one found; without those, from how the launches differ.

        Where neither tells, the memory is taken to be the cache's alone.
        """
        import numpy as np

        schemes = sorted({_scheme(each.settings) for each in servers})
        rows = []
        for each in servers:
            budget = float(each.options["max_batch_prefill_tokens"])
            rows.append([_share(each.settings), -budget, *(float(_scheme(each.settings) == name) for name in schemes)])
        matrix = np.asarray(rows)
        tokens = np.asarray([float(each.options["max_batch_total_tokens"]) for each in servers])
        per_prefill = dict.fromkeys(schemes, 0.0)
        if (told := _told_by_bytes(servers)) is not None:
            per_share, own = told
            # A scheme that no launch with bytes was made of costs what the dearest does.
            per_prefill = {scheme: own.get(scheme, max(own.values())) for scheme in schemes}
        elif np.linalg.matrix_rank(matrix) == matrix.shape[1]:
            per_share, each_token = (
                max(0.0, float(value)) for value in np.linalg.lstsq(matrix, tokens, rcond=None)[0][:2]
            )
            per_prefill = dict.fromkeys(schemes, each_token)
        else:
            per_share = float((tokens / matrix[:, 0]).max())
        taken = np.asarray([per_prefill[_scheme(each.settings)] for each in servers])
        rest = tokens - per_share * matrix[:, 0] - taken * matrix[:, 1]
        levels = {scheme: float(rest[matrix[:, 2 + number] > 0].mean()) for number, scheme in enumerate(schemes)}
        return cls(levels, per_share, per_prefill)

    def tokens(self, settings: Mapping[str, Any]) -> int:
        share = _share(settings)
        budget = float(settings.get("max_batch_prefill_tokens") or 0)
        scheme = _scheme(settings)
        level = self.levels.get(scheme, max(self.levels.values()))
        per_token = self.per_prefill_token.get(scheme, max(self.per_prefill_token.values()))
        return max(0, int(level + self.per_share * share - per_token * budget))


def _scheme(settings: Mapping[str, Any]) -> str:
    return str(settings.get("quantize") or "none")


def _share(settings: Mapping[str, Any]) -> float:
    return float(settings.get("cuda_memory_fraction") or 1.0)


def _told_by_bytes(servers: Sequence[Server]) -> tuple[float, dict[str, float]] | None:
    """Tokens for the whole memory, and by scheme those that a token of prefill budget costs; None: bytes do not tell.

    Each launch found share · memory = weights + largest prefill + tokens · bytes of a token. A CPU's memory is set;
    elsewhere it takes two launches that differ to know it.
    """
    import numpy as np

    found = [each for each in servers if each.memory.get("prefill_peak_bytes") and "weight_bytes" in each.memory]
    if not found:
        return None
    peaks = np.asarray([float(each.memory["prefill_peak_bytes"]) for each in found])
    taken = peaks + np.asarray([float(each.memory["weight_bytes"]) for each in found])
    tokens = np.asarray([float(each.options["max_batch_total_tokens"]) for each in found])
    shares = np.asarray([_share(each.settings) for each in found])
    given = found[0].settings.get("cpu_memory_gib")
    if given is not None:
        memory = float(given) * GIB
        bytes_per_token = float(np.median((shares * memory - taken) / tokens))
    else:
        matrix = np.column_stack([shares, -tokens])
        if np.linalg.matrix_rank(matrix) < 2:
            return None
        memory, bytes_per_token = map(float, np.linalg.lstsq(matrix, taken, rcond=None)[0])
    if memory <= 0 or bytes_per_token <= 0:
        return None
    by_scheme: dict[str, list[float]] = {}
    for each, peak in zip(found, peaks, strict=True):
        per_token = float(peak) / float(each.options["max_batch_prefill_tokens"])
        by_scheme.setdefault(_scheme(each.settings), []).append(per_token / bytes_per_token)
    return memory / bytes_per_token, {scheme: float(np.median(costs)) for scheme, costs in by_scheme.items()}


def run(
    server: Server, cost: CostModel, load: Load, *, with_gaps: bool = False, with_strides: bool = True
) -> Simulated:
    """Play a load on one server."""
    return Simulation(
        load,
        [(server.scheduler_options, cost.law)],
        max_concurrent_requests=server.max_concurrent_requests,
        with_gaps=with_gaps,
        with_strides=with_strides,
    ).run()


def predict(
    server: Server, cost: CostModel, load: Load, names: Sequence[str], limits_ms: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Metrics of a load on a server; nothing where its cache is so small that the router would not start."""
    options = server.scheduler_options
    longest = server.settings.get("max_total_tokens") or 2 * options.block_size
    if options.max_batch_total_tokens < max(int(longest), options.max_batch_prefill_tokens):
        return {}
    return metrics_of(run(server, cost, load), names, limits_ms)


def at_requests(load: Load, requests: int) -> Load:
    """The same load, cut after so many measured requests."""
    return replace(load, requests=requests, duration_ns=None)
