"""A LoRA adapter in peft's files: its config, and two factors for each module that it changes.

source: peft, tuners/lora. Anything beyond `W + s * B @ A` is refused by name.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from reference_server.errors import StartupError, UnsupportedError
from reference_server.json_files import read_json
from reference_server.model_server.weights.checkpoint import open_weights
from reference_server.model_server.weights.files import ADAPTER_CONFIG, ADAPTER_FILES

# Settings of peft that change the computation or the weights in the files.
UNSUPPORTED = (
    "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices", "use_qalora",
    "lora_bias", "layer_replication", "target_parameters", "alora_invocation_tokens", "use_bdlora", "arrow_config",
    "kasa_config", "velora_config", "monteclora_config",
)  # fmt: skip
# Other initializations also change the base model's weights.
INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
# Limit of rank and scale.
MAX_NUMBER = 1_000_000
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of a module's update `scaling * B @ A`. a: [r, in]; b: [out, r]."""

    a: Tensor
    b: Tensor

    def delta(self, scaling: float) -> Tensor:
        """[out, in], float32."""
        return (self.b.float() @ self.a.float()) * scaling


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of `base_model_id`; `factors` by module name in the base model."""

    base_model_id: str
    base_revision: str | None
    rank: int
    scaling: float
    factors: Mapping[str, Factors]

    @classmethod
    def open(cls, directory: Path) -> "Adapter":
        """Read an adapter. Raises StartupError for a wrong one, UnsupportedError for one not supported."""
        path = directory / ADAPTER_CONFIG
        config = _read_config(path)
        base = config.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise StartupError(f"{path}: `base_model_name_or_path` is {base!r}, but must be the name of the base model")
        revision = config.get("revision")
        if not isinstance(revision, str | None):
            raise StartupError(f"{path}: `revision` is {revision!r}, but must be a string")
        _refuse_unsupported(path, config)
        rank, scaling = _rank_and_scaling(path, config)
        return cls(base, revision or None, rank, scaling, _read_factors(find_file(directory), rank))

    def renamed(self, new_name: Callable[[str], str]) -> "Adapter":
        """The same adapter of a model whose modules have other names."""
        return replace(self, factors={new_name(name): factors for name, factors in self.factors.items()})


def find_file(directory: Path) -> Path:
    """The file of an adapter's weights. Raises StartupError if there is none."""
    file = next((directory / name for name in ADAPTER_FILES if (directory / name).is_file()), None)
    if file is None:
        raise StartupError(f"{directory} has neither {' nor '.join(ADAPTER_FILES)}")
    return file


def _read_config(path: Path) -> dict[str, Any]:
    return read_json(path)


def _rank_and_scaling(path: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if (
        isinstance(rank, int)
        and isinstance(alpha, int | float)
        and 1 <= rank <= MAX_NUMBER
        and abs(alpha) <= MAX_NUMBER
    ):
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    raise StartupError(
        f"{path}: `r` is {rank!r} and `lora_alpha` is {alpha!r}, but must be a whole number from 1 and a number, both "
        f"at most {MAX_NUMBER:,}"
    )


def _refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: `peft_type` is {kind!r}, but must be LORA")
    settings = {name: config[name] for name in UNSUPPORTED if config.get(name)}
    if config.get("bias", "none") != "none":
        settings["bias"] = config["bias"]
    if config.get("init_lora_weights") not in INITIALIZATIONS:
        settings["init_lora_weights"] = config["init_lora_weights"]
    if settings:
        shown = ", ".join(f"`{name}` {value!r}" for name, value in settings.items())
        raise UnsupportedError(f"{path}: {shown} is not supported; merge the adapter with peft (merge_and_unload)")


def _read_factors(path: Path, rank: int) -> dict[str, Factors]:
    file = open_weights(path)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name in file.shapes:
        match = _NAME.fullmatch(name)
        if match is None:
            raise UnsupportedError(f"{path}: {name} is not a LoRA factor of a linear layer, so it cannot be used")
        pairs.setdefault(match["module"], {})[match["factor"]] = file.read(name, None)
    if not pairs:
        raise StartupError(f"{path} holds no weights")
    return {module: _factors(path, module, pair, rank) for module, pair in sorted(pairs.items())}


def _factors(path: Path, module: str, pair: Mapping[str, Tensor], rank: int) -> Factors:
    a, b = pair.get("A"), pair.get("B")
    if a is None or b is None:
        raise StartupError(f"{path}: {module} has only one of lora_A and lora_B, but both are needed")
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise StartupError(f"{path}: {module} has factors {tuple(b.shape)} and {tuple(a.shape)}, but `r` is {rank}")
    return Factors(a, b)
