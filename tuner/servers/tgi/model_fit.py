"""Whether a model fits on GPUs with each value of `--quantize`, and the number of K/V tokens that then fit.

memory x fraction x wiggle room   |--reserve--|--largest prefill--|--weights--|--------- K/V ---------|
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reference_server.configuration.config import ServerConfig
from reference_server.errors import UnsupportedError
from reference_server.launcher.devices import Devices, Gpu
from reference_server.launcher.model_facts import ModelFacts, read_model_config
from reference_server.launcher.plan import prefill_tokens
from reference_server.model_server.options import WIGGLE_ROOM
from tuner.errors import ModelSizeError
from tuner.servers.tgi.parameter_count import ParameterCount, count_parameters, with_common_names
from tuner.servers.tgi.weight_methods import PLAIN, WeightMethod, methods_of

MIB = 2**20
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """Identical GPUs that share a model, with one shard on each.

    reserve_bytes: memory of each GPU for the driver, the CUDA context and kernels. prefill_tokens: tokens of the
    largest prefill; None for the launcher's default.
    """

    gpu: Gpu
    count: int = 1
    memory_fraction: float = 1.0
    reserve_bytes: int = 1024 * MIB
    prefill_tokens: int | None = None

    @property
    def budget_bytes(self) -> float:
        """Memory of one GPU for weights, the largest prefill and K/V."""
        return self.gpu.memory_mib * MIB * self.memory_fraction * WIGGLE_ROOM - self.reserve_bytes


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """The numbers that determine the memory of a model. `width`: bytes of a number in the compute type."""

    model_type: str
    parameters: ParameterCount
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    prefill_bytes_per_token: int

    def kv_heads_of(self, count: int) -> int:
        """K/V heads on each of `count` GPUs. With fewer heads than GPUs, a head is on several GPUs."""
        return max(1, self.num_kv_heads // count)

    def kv_bytes_per_token(self, count: int = 1, *, has_float8: bool = False) -> int:
        """K/V bytes of one token on each of `count` GPUs. has_float8: with an eight-bit `kv_cache_dtype`."""
        return 2 * self.kv_heads_of(count) * self.head_dim * self.num_layers * (1 if has_float8 else self.width)

    def weight_bytes(self, method: WeightMethod, count: int = 1) -> int:
        """Bytes of the weights on each of `count` GPUs."""
        parts, plain = self.parameters, self.width
        stored = plain if method.bits is None else method.bits / 8
        attention = plain if method.mlp_only else stored
        inner = max(0, self.num_layers - 2) / self.num_layers if method.mlp_only else 1.0
        mlp = stored * inner + plain * (1 - inner)
        keys_values = parts.keys_values * attention * self.kv_heads_of(count) / self.num_kv_heads
        shared = parts.attention * attention + parts.mlp * mlp + (parts.experts + parts.vocabulary) * plain
        return round(shared / count + keys_values + parts.vectors * plain)


@dataclass(frozen=True, slots=True)
class MethodFit:
    """One method on one group of GPUs. `refusal`: the reason why a launch is impossible; None if it is possible."""

    method: WeightMethod
    weight_bytes: int
    weight_bytes_per_gpu: int
    free_bytes_per_gpu: int
    kv_tokens: int
    refusal: str | None

    def requests_of(self, tokens: int) -> int:
        """Number of concurrent requests, each of `tokens` prompt and output tokens, whose K/V fit."""
        return self.kv_tokens // tokens


def read_config(model_id: str | None, numbers: Mapping[str, Any], revision: str | None = None) -> dict[str, Any]:
    """A model's config.json, overridden by `numbers`; only `numbers` without a model. Raises ModelSizeError."""
    found: Mapping[str, Any] | None = {}
    try:
        if model_id is not None:
            found = read_model_config(model_id, revision)
    except UnsupportedError as error:
        raise ModelSizeError(str(error)) from error
    if found is None:
        raise ModelSizeError(
            f"could not read the config.json of {model_id}: use a directory with this file, a preset, or --numbers"
        )
    return {**found, **numbers}


def size_of(config: Mapping[str, Any]) -> DecoderSize:
    """The sizes in a config.json. Raises ModelSizeError with the missing or unsupported field."""
    named = with_common_names(config)
    parameters = count_parameters(named)
    facts = ModelFacts.parse(named)
    heads, kv_heads = facts.num_heads or 0, facts.num_kv_heads or 0
    layers, head_dim = facts.num_layers or 0, facts.head_dim or 0
    dtype = named.get("dtype") or named.get("torch_dtype")
    return DecoderSize(
        model_type=str(named["model_type"]),
        parameters=parameters,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        width=WIDTHS.get(str(dtype), 2),
        # The launcher's estimate without its K/V, which it counts with two bytes a number.
        prefill_bytes_per_token=(facts.bytes_per_token or 0) - 4 * kv_heads * head_dim * layers,
    )


def largest_prefill(config: Mapping[str, Any], group: GpuGroup, method: WeightMethod) -> int:
    """Tokens of the largest prefill: `group.prefill_tokens`, or the launcher's default for these GPUs."""
    launch = ServerConfig(cuda_memory_fraction=group.memory_fraction, max_batch_prefill_tokens=group.prefill_tokens)
    devices = Devices(gpus=(group.gpu,) * group.count)
    quantize = None if method.name == PLAIN else method.name
    return prefill_tokens(launch, ModelFacts.parse(config), devices, group.count, quantize)[0]


def fits(config: Mapping[str, Any], group: GpuGroup) -> Sequence[MethodFit]:
    """One row for each method that the model's checkpoint allows.

    Raises ModelSizeError if the heads of the model cannot be divided over the GPUs.
    """
    size = size_of(config)
    _check_divisible(size, group.count)
    return [_fit(config, size, group, method) for method in methods_of(config)]


def _fit(config: Mapping[str, Any], size: DecoderSize, group: GpuGroup, method: WeightMethod) -> MethodFit:
    weights = size.weight_bytes(method, group.count)
    free = int(group.budget_bytes - weights)
    if free > 0:
        free -= largest_prefill(config, group, method) * size.prefill_bytes_per_token
    refusal = None
    if group.count > 1 and not method.is_sharded:
        refusal = "supports only one GPU"
    elif free < 0:
        refusal = f"needs {-free / 2**30:.1f} GiB more on each GPU"
    return MethodFit(
        method,
        weight_bytes=size.weight_bytes(method),
        weight_bytes_per_gpu=weights,
        free_bytes_per_gpu=free,
        kv_tokens=0 if refusal else free // size.kv_bytes_per_token(group.count),
        refusal=refusal,
    )


def _check_divisible(size: DecoderSize, count: int) -> None:
    heads, kv_heads = size.num_heads, size.num_kv_heads
    if heads % count or (kv_heads % count and count % kv_heads):
        allowed = [n for n in range(1, 17) if not heads % n and not (kv_heads % n and n % kv_heads)]
        raise ModelSizeError(
            f"{heads} heads and {kv_heads} K/V heads cannot be divided over {count} GPUs: use "
            f"{', '.join(map(str, allowed))}"
        )
