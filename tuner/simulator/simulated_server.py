"""Describes a launched server for the simulator, and the same server with other settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from loadgen.config.bench_config import BenchConfig
from reference_server.router.scheduling.scheduler_options import SchedulerOptions, WireVersion
from tuner.errors import NotSimulatedError
from tuner.simulator.load import shares_prefixes
from tuner.simulator.simulation import BatchingRule
from tuner.simulator.slot_replica import UNLIMITED_TOKENS, SlotRule

NOT_MODELLED = ("lora_adapters", "num_shard")
GIB = 2**30
OPTION_NAMES = tuple(each.name for each in fields(SchedulerOptions))
SLOT_NAMES = tuple(each.name for each in fields(SlotRule))
MAX_CONCURRENT = 128


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """A launched server.

    options: fields of its `SchedulerOptions`, or of its `SlotRule` for a server with slots. memory: bytes by use.
    device: the type of the device; None if unknown.
    """

    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    memory: Mapping[str, int] = field(default_factory=dict)
    device: str | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "SimulatedServer":
        """The server of a step trace's facts. Raises NotSimulatedError."""
        options = facts.get("scheduler")
        if not isinstance(options, Mapping) or any(name not in OPTION_NAMES for name in options):
            raise NotSimulatedError("the step trace has no scheduler options, or unknown ones")
        values = {name: each.get("value") for name, each in facts.get("settings", {}).items()}
        engine = facts.get("engine", {})
        return cls(dict(options), values, dict(engine.get("memory") or {}), engine.get("backend"))

    def with_settings(self, settings: Mapping[str, Any], pool: "KvPool | None" = None) -> "SimulatedServer":
        """The server with other settings. `pool` computes its K/V tokens. Raises NotSimulatedError."""
        if self.has_slots:
            return self._with_slot_settings(settings)
        changed_names = [
            name for name in NOT_MODELLED if _listed(settings.get(name)) != _listed(self.settings.get(name))
        ]
        if unmodelled := [name for name in changed_names if settings.get(name) not in (None, 0, 1, "", (), [], "none")]:
            raise NotSimulatedError(f"`{unmodelled[0]}` is not simulated")
        known = {name: settings[name] for name in OPTION_NAMES if settings.get(name) is not None}
        options = {**self.options, **known}
        if "prefill_chunking" in settings:
            options["supports_chunking"] = bool(settings["prefill_chunking"])
        if settings.get("prefix_caching") is not None:
            options["use_prefix_caching"] = bool(settings["prefix_caching"])
        if pool is not None and "max_batch_total_tokens" not in known:
            changed = {name: value for name, value in settings.items() if value is not None}
            budget = {"max_batch_prefill_tokens": options["max_batch_prefill_tokens"]}
            options["max_batch_total_tokens"] = pool.tokens({**self.settings, **changed, **budget})
        return replace(self, options=options, settings={**self.settings, **settings})

    def _with_slot_settings(self, settings: Mapping[str, Any]) -> "SimulatedServer":
        if unknown := [name for name in settings if name not in SLOT_NAMES]:
            raise NotSimulatedError(
                f"`{unknown[0]}` is not simulated: the costs are from client timings of a server with slots, which has "
                f"the settings {', '.join(SLOT_NAMES)}"
            )
        return replace(self, options={**self.options, **settings}, settings={**self.settings, **settings})

    def for_load(self, config: BenchConfig) -> "SimulatedServer":
        """The server for a load. Without shared prefixes, prefix caching is off: the result is equal, but faster."""
        if self.has_slots or shares_prefixes(config):
            return self
        return replace(self, options={**self.options, "use_prefix_caching": False})

    @property
    def has_slots(self) -> bool:
        """Whether the server has the batching rule of slots, from a calibration with client timings."""
        return "slots" in self.options

    @property
    def rule(self) -> BatchingRule:
        """The rule by which the server forms batches. Raises NotSimulatedError."""
        return slot_rule(self.options) if self.has_slots else self.scheduler_options

    @property
    def scheduler_options(self) -> SchedulerOptions:
        return SchedulerOptions(**{**self.options, "schema": WireVersion(self.options.get("schema", WireVersion.V3))})

    @property
    def uses_prefix_caching(self) -> bool:
        return bool(self.options.get("use_prefix_caching"))

    @property
    def times_drafts(self) -> bool:
        """Whether the server measures the steps of a request that is alone: one rank on a CPU that runs ahead."""
        is_alone = int(self.settings.get("num_shard") or 1) == 1
        return self.device == "cpu" and is_alone and self.settings.get("run_ahead") is not False

    @property
    def max_concurrent_requests(self) -> int:
        """Limit of requests in the server. A server with slots has no limit."""
        most = UNLIMITED_TOKENS if self.has_slots else MAX_CONCURRENT
        return int(self.settings.get("max_concurrent_requests") or most)


def _listed(value: object) -> object:
    """A list setting as a list. Settings files and traces of launches can have it as text with commas."""
    return value.split(",") if isinstance(value, str) else list(value) if isinstance(value, Sequence) else value


def slot_rule(options: Mapping[str, Any]) -> SlotRule:
    """The rule of a cost file or of settings. Raises NotSimulatedError."""
    for name, least in (("slots", 1), ("prefill_tokens", 1), ("prefill_prompts", 1), ("steps_between", 0)):
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise NotSimulatedError(f"`{name}` is {value!r}, but must be a whole number of at least {least}")
    if not isinstance(options.get("mixes_prefill", True), bool):
        raise NotSimulatedError(f"`mixes_prefill` is {options['mixes_prefill']!r}, but must be true or false")
    return SlotRule(**options)


@dataclass(frozen=True, slots=True)
class KvPool:
    """The number of K/V tokens that fit in memory, fitted to launches.

    tokens * element bytes = levels[scheme] + per_fraction * cuda_memory_fraction - per_prefill_token[scheme] * prefill
    budget. The scheme is the value of `quantize`; the bytes are those of a number in the cache.
    """

    levels: Mapping[str, float]
    per_fraction: float
    per_prefill_token: Mapping[str, float]

    @classmethod
    def of(cls, servers: Sequence[SimulatedServer]) -> "KvPool":
        """Fit the pool to launches.

        The costs are from the first of these sources that determines them: the memory that launches reported; the
        differences between launches; the assumption that all memory is K/V.
        """
        import numpy as np

        per_fraction, by_scheme = _from_bytes(servers) or _from_differences(servers) or _all_memory(servers)
        # A scheme without a cost of its own has the highest one.
        highest = max(by_scheme.values())
        schemes = sorted({scheme_of(each.settings) for each in servers})
        per_prefill = {scheme: by_scheme.get(scheme, highest) for scheme in schemes}
        rest: dict[str, list[float]] = {scheme: [] for scheme in schemes}
        for each in servers:
            scheme = scheme_of(each.settings)
            taken = per_prefill[scheme] * _budget(each)
            rest[scheme].append(_tokens(each) - per_fraction * _fraction(each.settings) + taken)
        return cls({scheme: float(np.mean(each)) for scheme, each in rest.items()}, per_fraction, per_prefill)

    def tokens(self, settings: Mapping[str, Any]) -> int:
        fraction = _fraction(settings)
        budget = float(settings.get("max_batch_prefill_tokens") or 0)
        scheme = scheme_of(settings)
        level = self.levels.get(scheme, max(self.levels.values()))
        per_token = self.per_prefill_token.get(scheme, max(self.per_prefill_token.values()))
        size = level + self.per_fraction * fraction - per_token * budget
        return max(0, int(size / element_bytes(settings)))


def element_bytes(settings: Mapping[str, Any]) -> int:
    """Bytes of a number in the K/V cache."""
    if has_float8_cache(settings):
        return 1
    return 4 if settings.get("dtype") == "float32" else 2


def has_float8_cache(settings: Mapping[str, Any]) -> bool:
    """Whether a number in the K/V cache has eight bits."""
    return str(settings.get("kv_cache_dtype") or "").startswith("fp8")


def scheme_of(settings: Mapping[str, Any]) -> str:
    """The value of `quantize`. Each scheme has its own cost model."""
    return str(settings.get("quantize") or "none")


def _fraction(settings: Mapping[str, Any]) -> float:
    return float(settings.get("cuda_memory_fraction") or 1.0)


def _budget(server: SimulatedServer) -> float:
    return float(server.options["max_batch_prefill_tokens"])


def _tokens(server: SimulatedServer) -> float:
    """The K/V tokens, times the bytes of a number."""
    return float(server.options["max_batch_total_tokens"]) * element_bytes(server.settings)


# Two values in units of K/V tokens times the bytes of a number: the size of the whole memory, and by scheme the size
# that one token of the prefill budget takes.
PoolCosts = tuple[float, dict[str, float]]


def _all_memory(servers: Sequence[SimulatedServer]) -> PoolCosts:
    """All memory is K/V, and the prefill budget costs nothing."""
    largest = max(_tokens(each) / _fraction(each.settings) for each in servers)
    return largest, {scheme_of(each.settings): 0.0 for each in servers}


def _from_differences(servers: Sequence[SimulatedServer]) -> PoolCosts | None:
    """Costs from the least-squares fit of `KvPool`'s formula; None if the launches do not determine it."""
    import numpy as np

    schemes = sorted({scheme_of(each.settings) for each in servers})
    matrix = np.asarray(
        [
            [_fraction(each.settings), -_budget(each), *(float(scheme_of(each.settings) == name) for name in schemes)]
            for each in servers
        ]
    )
    if np.linalg.matrix_rank(matrix) < matrix.shape[1]:
        return None
    found = np.linalg.lstsq(matrix, np.asarray([_tokens(each) for each in servers]), rcond=None)[0]
    per_fraction, per_token = (max(0.0, float(value)) for value in found[:2])
    return per_fraction, dict.fromkeys(schemes, per_token)


def _from_bytes(servers: Sequence[SimulatedServer]) -> PoolCosts | None:
    """Costs from the memory that launches reported; None if it is unknown.

    For each launch: fraction * memory = weights + largest prefill + tokens * bytes per token. The memory of a CPU is
    configured. On other devices, two different launches determine it.
    """
    import numpy as np

    found = [each for each in servers if each.memory.get("prefill_peak_bytes") and "weight_bytes" in each.memory]
    if not found:
        return None
    peaks = np.asarray([float(each.memory["prefill_peak_bytes"]) for each in found])
    taken = peaks + np.asarray([float(each.memory["weight_bytes"]) for each in found])
    tokens = np.asarray([_tokens(each) for each in found])
    fractions = np.asarray([_fraction(each.settings) for each in found])
    cpu_gib = found[0].settings.get("cpu_memory_gib")
    if cpu_gib is not None:
        memory = float(cpu_gib) * GIB
        bytes_per_token = float(np.median((fractions * memory - taken) / tokens))
    else:
        matrix = np.column_stack([fractions, -tokens])
        if np.linalg.matrix_rank(matrix) < 2:
            return None
        memory, bytes_per_token = map(float, np.linalg.lstsq(matrix, taken, rcond=None)[0])
    if memory <= 0 or bytes_per_token <= 0:
        return None
    by_scheme: dict[str, list[float]] = {}
    for each, peak in zip(found, peaks, strict=True):
        per_token = float(peak) / _budget(each)
        by_scheme.setdefault(scheme_of(each.settings), []).append(per_token / bytes_per_token)
    return memory / bytes_per_token, {scheme: float(np.median(costs)) for scheme, costs in by_scheme.items()}
