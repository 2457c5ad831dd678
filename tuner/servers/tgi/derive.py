"""The default space of a study without `[param]`, and the parameters without effect on a target.

A parameter without effect is reported and not searched. All functions except `facts_of` and `local_devices` are pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.workloads.lengths import Lengths
from reference_server.configuration.config import ServerConfig
from reference_server.configuration.config_fields import tunables
from reference_server.launcher.devices import Devices, probe_devices
from reference_server.launcher.model_facts import ModelFacts, read_model_config
from tuner.config import ParamSection
from tuner.errors import SpaceError
from tuner.servers.tgi.settings import server_config
from tuner.servers.tgi.tgi_command import is_bundled_only
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace

# Memory of the embedded preset with which the default load fills the K/V pool.
PRESET_MEMORY: Mapping[str, Any] = {"cpu_memory_gib": 0.15}
LEAST_BUDGET = 64
GIB = 2**30
DEFAULT_CPU_GIB = 4.0
# A smaller fraction of the memory never serves more load. It is searched only if the study sets the range.
LEAST_MEMORY_FRACTION = 0.80
WAIT_KNOBS = ("max_waiting_tokens", "waiting_served_ratio")


@dataclass(frozen=True, slots=True)
class Demand:
    """Upper bounds of a load: concurrent users, and tokens of one request. None if the load has no bound."""

    users: int | None
    longest_input: int | None
    longest_total: int | None

    @classmethod
    def of(cls, load: BenchConfig) -> "Demand":
        """The demand of a load. An open loop has no bound of users."""
        inputs, outputs = _longest(load.input_tokens), _longest(load.output_tokens)
        is_known = load.workload == "synthetic"
        total = inputs + outputs if inputs is not None and outputs is not None else None
        users = load.concurrency if load.mode == "closed" else None
        return cls(users, inputs if is_known else None, total if is_known else None)


def derived_params(fixed: Mapping[str, Any], *, is_own: bool = True) -> dict[str, ParamSection]:
    """The central `Tunable` fields that `fixed` does not set, as parameters.

    The range of the prefill budget depends on the longest prompt and begins at a sixteenth of it, because prefill is
    chunked. Choices that the server under study does not have are left out.
    """
    sections: dict[str, ParamSection] = {}
    for name, tunable in tunables(ServerConfig).items():
        if not tunable.central or name in fixed:
            continue
        low, high = tunable.low, tunable.high
        longest = fixed.get("max_input_tokens")
        if name == "max_batch_prefill_tokens" and isinstance(longest, int):
            low, high = max(LEAST_BUDGET, longest // 16), max(4096, 4 * longest)
        if name == "cuda_memory_fraction" and low is not None and high is not None:
            low = max(low, min(LEAST_MEMORY_FRACTION, high))
        sections[name] = ParamSection(
            type=tunable.kind,
            low=low,
            high=high,
            log=tunable.log,
            step=tunable.step,
            multiple_of=tunable.multiple_of,
            values=tuple(
                choice
                for choice in tunable.choices
                if (_is_supported(name, choice) if is_own else not is_bundled_only(name, choice))
            ),
            when=tunable.when,
        )
    return sections


def local_devices() -> Devices:
    """The devices of this machine."""
    return probe_devices(parsing.environment("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"))


def facts_of(model_id: str) -> ModelFacts | None:
    """The facts of a model's config.json; None if it cannot be read."""
    content = read_model_config(model_id)
    return ModelFacts.parse(content) if content is not None else None


def searched_without_effect(
    space: SearchSpace, fixed: Mapping[str, Any], demand: Demand, facts: ModelFacts | None, devices: Devices
) -> dict[str, str]:
    """Parameters of the space without effect on this target: name to reason."""
    found: dict[str, str] = {}
    chunking = _chunking(space, fixed)
    for parameter in space.parameters:
        reason = _why_no_effect(parameter, space, fixed, demand, facts, devices, chunking)
        if reason is not None:
            found[parameter.name] = reason
    return found


def disabled_by_fixed(fixed: Mapping[str, Any]) -> dict[str, str]:
    """Parameters that lose their effect through fixed settings: name to reason.

    >>> sorted(disabled_by_fixed({"prefill_chunking": True}))
    ['max_waiting_tokens', 'waiting_served_ratio']
    """
    if fixed.get("prefill_chunking") is not True:
        return {}
    return {name: "chunked prefill does not use it" for name in WAIT_KNOBS if name not in fixed}


def _why_no_effect(
    parameter: Parameter,
    space: SearchSpace,
    fixed: Mapping[str, Any],
    demand: Demand,
    facts: ModelFacts | None,
    devices: Devices,
    chunking: bool | None,
) -> str | None:
    name = parameter.name
    if parameter.cannot_vary:
        return "it has only one value here"
    if name in WAIT_KNOBS and chunking is True:
        return "chunked prefill does not use it"
    if name == "max_batch_size" and chunking is True:
        return "with chunked prefill it limits only the first batch"
    if name == "cuda_graphs" and not devices.gpus:
        return "CUDA graphs need a GPU"
    if name == "cuda_memory_fraction":
        return _memory_reason(parameter, space, fixed, demand, facts, devices)
    if name == "max_batch_prefill_tokens" and demand.users and demand.longest_input:
        most = demand.users * demand.longest_input
        if parameter.low >= most:
            return (
                f"the load has at most {most:,} prompt tokens at one time, and the range begins at {parameter.low:,.0f}"
            )
    return None


def _memory_reason(
    parameter: Parameter,
    space: SearchSpace,
    fixed: Mapping[str, Any],
    demand: Demand,
    facts: ModelFacts | None,
    devices: Devices,
) -> str | None:
    if facts is None or facts.weight_bytes is None:
        return None
    bytes_per_token = cache_bytes_per_token(facts, is_cpu=not devices.gpus, fixed=fixed)
    held = parameter.low * device_bytes(fixed, devices) - _weights(facts, devices)
    tokens = int(held / bytes_per_token) if held > 0 and bytes_per_token else 0
    limit = fixed.get("max_batch_total_tokens")
    if isinstance(limit, int) and limit <= tokens:
        return f"`max_batch_total_tokens` is fixed at {limit:,}, and the lowest fraction holds {tokens:,} tokens"
    if demand.users and demand.longest_total:
        # The largest prefill needs memory in addition to the K/V pool.
        needed = demand.users * demand.longest_total
        prefill = _largest_prefill(space, fixed, demand)
        prefill_bytes = prefill * (facts.bytes_per_token or 0)
        if held - prefill_bytes >= needed * bytes_per_token:
            return f"the lowest fraction holds {tokens:,} tokens of K/V, and the load needs at most {needed:,}"
    return None


def device_bytes(fixed: Mapping[str, Any], devices: Devices) -> float:
    """The memory to which `cuda_memory_fraction` applies, in bytes."""
    if devices.gpus:
        return float(devices.gpus[0].memory_mib) * 2**20
    cpu_gib = fixed.get("cpu_memory_gib")
    if cpu_gib is not None:
        return float(cpu_gib) * GIB
    half = (devices.available_memory_bytes or 2 * DEFAULT_CPU_GIB * GIB) / 2
    return min(DEFAULT_CPU_GIB * GIB, half)


def cache_bytes_per_token(facts: ModelFacts, *, is_cpu: bool, fixed: Mapping[str, Any]) -> int:
    """K/V bytes of one token. A number has four bytes on a CPU, two on a GPU, one if a fixed type has 8 bits."""
    if facts.num_kv_heads is None or facts.head_dim is None or facts.num_layers is None:
        return 0
    width = 1 if str(fixed.get("kv_cache_dtype") or "").startswith("fp8") else 4 if is_cpu else 2
    return 2 * facts.num_kv_heads * facts.head_dim * facts.num_layers * width


def _weights(facts: ModelFacts, devices: Devices) -> int:
    return (facts.weight_bytes or 0) * (1 if devices.gpus else 2)


def _largest_prefill(space: SearchSpace, fixed: Mapping[str, Any], demand: Demand) -> int:
    budget = next((each.high for each in space.parameters if each.name == "max_batch_prefill_tokens"), None)
    most = int(budget if budget is not None else fixed.get("max_batch_prefill_tokens") or 4096)
    together = (demand.users or 1) * (demand.longest_input or most)
    return min(most, together)


def _chunking(space: SearchSpace, fixed: Mapping[str, Any]) -> bool | None:
    """Whether prefill is chunked; None if it is searched."""
    if any(each.name == "prefill_chunking" and not each.cannot_vary for each in space.parameters):
        return None
    return bool(fixed.get("prefill_chunking", True))


def _longest(text: str | None) -> int | None:
    try:
        lengths = Lengths.parse(text) if text else None
    except (UsageError, ValueError):
        return None
    return lengths.longest if lengths is not None else None


def _is_supported(name: str, choice: Any) -> bool:
    try:
        server_config({name: choice})
    except SpaceError:
        return False
    return True
