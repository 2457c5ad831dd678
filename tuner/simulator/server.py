"""The simulator's description of a launched server, and of the same server under other settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from loadgen.config.bench_config import BenchConfig
from reference_server.router.scheduling.scheduler import SchedulerOptions, WireVersion
from tuner.errors import NotSimulatedError
from tuner.simulator.engine import BatchingRule
from tuner.simulator.load import shares_prefixes
from tuner.simulator.slot_replica import UNLIMITED_TOKENS, SlotRule

NOT_MODELLED = ("lora_adapters", "speculate", "num_shard")
GIB = 2**30
OPTION_NAMES = tuple(each.name for each in fields(SchedulerOptions))
SLOT_NAMES = tuple(each.name for each in fields(SlotRule))
MAX_CONCURRENT = 128


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """A launched server: its scheduler options, its settings, and the bytes of its memory by use.

    The options of a server with slots are those of its `SlotRule`.
    """

    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    memory: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "SimulatedServer":
        """The server of a step trace's facts. Raises NotSimulatedError."""
        options = facts.get("scheduler")
        if not isinstance(options, Mapping) or any(name not in OPTION_NAMES for name in options):
            raise NotSimulatedError("the step trace has no scheduler options, or unknown ones")
        values = {name: each.get("value") for name, each in facts.get("settings", {}).items()}
        return cls(dict(options), values, dict(facts.get("engine", {}).get("memory") or {}))

    def with_settings(self, settings: Mapping[str, Any], pool: "KvPool | None" = None) -> "SimulatedServer":
        """The server with other settings; the K/V pool is recomputed from the memory that they leave."""
        if self.has_slots:
            return self._with_slot_settings(settings)
        if unmodelled := [name for name in NOT_MODELLED if settings.get(name) not in (None, 0, 1, "", (), [], "none")]:
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
        return SimulatedServer(options, {**self.settings, **settings}, self.memory)

    def _with_slot_settings(self, settings: Mapping[str, Any]) -> "SimulatedServer":
        if unknown := [name for name in settings if name not in SLOT_NAMES]:
            raise NotSimulatedError(
                f"`{unknown[0]}` is not simulated: the costs are from client timings of a server with slots, whose "
                f"settings are {', '.join(SLOT_NAMES)}"
            )
        return SimulatedServer({**self.options, **settings}, {**self.settings, **settings}, self.memory)

    def for_load(self, config: BenchConfig) -> "SimulatedServer":
        """The server without prefix caching if the load has no shared prefixes; decisions are the same."""
        if self.has_slots or shares_prefixes(config):
            return self
        return SimulatedServer({**self.options, "use_prefix_caching": False}, self.settings, self.memory)

    @property
    def has_slots(self) -> bool:
        """Whether the server was calibrated from client timings, as one with slots."""
        return "slots" in self.options

    @property
    def rule(self) -> BatchingRule:
        """How the server forms its batches. Raises NotSimulatedError."""
        return slot_rule(self.options) if self.has_slots else self.scheduler_options

    @property
    def scheduler_options(self) -> SchedulerOptions:
        return SchedulerOptions(**{**self.options, "schema": WireVersion(self.options.get("schema", WireVersion.V3))})

    @property
    def uses_prefix_caching(self) -> bool:
        return bool(self.options.get("use_prefix_caching"))

    @property
    def max_concurrent_requests(self) -> int:
        """Requests that the server accepts at once; one with slots queues all others."""
        most = UNLIMITED_TOKENS if self.has_slots else MAX_CONCURRENT
        return int(self.settings.get("max_concurrent_requests") or most)


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

    tokens = levels[scheme] + per_fraction * cuda_memory_fraction - per_prefill_token[scheme] * prefill budget, where
    the scheme is the value of `quantize`.
    """

    levels: Mapping[str, float]
    per_fraction: float
    per_prefill_token: Mapping[str, float]

    @classmethod
    def of(cls, servers: Sequence[SimulatedServer]) -> "KvPool":
        """Fit to the memory that each launch reported; without it to the differences between launches.

        If neither determines the costs, all memory is counted as K/V.
        """
        import numpy as np

        schemes = sorted({scheme_of(each.settings) for each in servers})
        rows = []
        for each in servers:
            budget = float(each.options["max_batch_prefill_tokens"])
            rows.append(
                [_fraction(each.settings), -budget, *(float(scheme_of(each.settings) == name) for name in schemes)]
            )
        matrix = np.asarray(rows)
        tokens = np.asarray([float(each.options["max_batch_total_tokens"]) for each in servers])
        per_prefill = dict.fromkeys(schemes, 0.0)
        if (fitted := _from_bytes(servers)) is not None:
            per_fraction, own = fitted
            # A scheme without a launch that reported bytes costs as much as the most expensive one.
            per_prefill = {scheme: own.get(scheme, max(own.values())) for scheme in schemes}
        elif np.linalg.matrix_rank(matrix) == matrix.shape[1]:
            per_fraction, each_token = (
                max(0.0, float(value)) for value in np.linalg.lstsq(matrix, tokens, rcond=None)[0][:2]
            )
            per_prefill = dict.fromkeys(schemes, each_token)
        else:
            per_fraction = float((tokens / matrix[:, 0]).max())
        taken = np.asarray([per_prefill[scheme_of(each.settings)] for each in servers])
        rest = tokens - per_fraction * matrix[:, 0] - taken * matrix[:, 1]
        levels = {scheme: float(rest[matrix[:, 2 + number] > 0].mean()) for number, scheme in enumerate(schemes)}
        return cls(levels, per_fraction, per_prefill)

    def tokens(self, settings: Mapping[str, Any]) -> int:
        fraction = _fraction(settings)
        budget = float(settings.get("max_batch_prefill_tokens") or 0)
        scheme = scheme_of(settings)
        level = self.levels.get(scheme, max(self.levels.values()))
        per_token = self.per_prefill_token.get(scheme, max(self.per_prefill_token.values()))
        return max(0, int(level + self.per_fraction * fraction - per_token * budget))


def scheme_of(settings: Mapping[str, Any]) -> str:
    """The value of `quantize`; cost models are fitted by scheme."""
    return str(settings.get("quantize") or "none")


def _fraction(settings: Mapping[str, Any]) -> float:
    return float(settings.get("cuda_memory_fraction") or 1.0)


def _from_bytes(servers: Sequence[SimulatedServer]) -> tuple[float, dict[str, float]] | None:
    """Tokens in the whole memory, and by scheme the tokens that one token of prefill budget costs; None if unknown.

    For each launch: fraction * memory = weights + largest prefill + tokens * bytes per token. The memory of a CPU is
    configured; on other devices two different launches determine it.
    """
    import numpy as np

    found = [each for each in servers if each.memory.get("prefill_peak_bytes") and "weight_bytes" in each.memory]
    if not found:
        return None
    peaks = np.asarray([float(each.memory["prefill_peak_bytes"]) for each in found])
    taken = peaks + np.asarray([float(each.memory["weight_bytes"]) for each in found])
    tokens = np.asarray([float(each.options["max_batch_total_tokens"]) for each in found])
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
        per_token = float(peak) / float(each.options["max_batch_prefill_tokens"])
        by_scheme.setdefault(scheme_of(each.settings), []).append(per_token / bytes_per_token)
    return memory / bytes_per_token, {scheme: float(np.median(costs)) for scheme, costs in by_scheme.items()}
