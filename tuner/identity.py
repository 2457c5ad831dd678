"""What makes two trials comparable: the space, the load, the server's build and the device. Digests are of JSON."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from loadgen import settings
from loadgen.config import BenchConfig
from loadgen.machine import describe_machine, product_version
from reference_server.launcher.devices import Devices, probe_devices
from tuner.config import ParamSection, TuneConfig
from tuner.derive import derived_params

SPACE, RANGES, LOAD, BUILD, DEVICE = "space", "ranges", "load", "build", "device"


def params_of(config: TuneConfig) -> Mapping[str, ParamSection]:
    """The searched parameters: the file's, or those derived from the model."""
    return config.param or derived_params(config.server.fixed, is_own=config.server.kind == "own")


def identity_of(config: TuneConfig, params: Mapping[str, ParamSection], load: BenchConfig) -> dict[str, str]:
    """The digests of a study. `space` is what may not change in one, `ranges` what may become wider or narrower."""
    shapes = {name: section.model_dump(mode="json", exclude={"low", "high"}) for name, section in params.items()}
    ranges = {name: [section.low, section.high] for name, section in params.items()}
    space = {
        "server": config.server.model_dump(mode="json", exclude={"ready_timeout_s", "gpus", "volume", "shm_size"}),
        "param": shapes,
        "forbid": [section.if_ for section in config.forbid],
        "objective": config.objective.model_dump(mode="json"),
    }
    return {
        SPACE: digest(space),
        RANGES: digest(ranges),
        LOAD: digest(load.load_description()),
        BUILD: build_of(config),
        DEVICE: device_class(config.server.gpus),
    }


def digest_of(config: TuneConfig, params: Mapping[str, ParamSection], load: BenchConfig) -> str:
    """A digest of space and load: what an unnamed study is called by. Ranges count: others are another study."""
    found = identity_of(config, params, load)
    return digest([found[SPACE], found[RANGES], found[LOAD]])


def build_of(config: TuneConfig) -> str:
    """What is launched: our version, an image, or a command."""
    match config.server.kind:
        case "own":
            return f"tgi-bench {product_version()}"
        case "tgi-docker":
            return config.server.image
        case _:
            return config.server.command or "text-generation-launcher"


def devices() -> Devices:
    """What this machine has to compute on."""
    return probe_devices(settings.environment("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"))


def device_class(gpus: tuple[int, ...]) -> str:
    """The kind of device: results of one say nothing about another."""
    names = [gpu.name for gpu in devices().gpus]
    chosen = [names[index] for index in gpus if index < len(names)] or names[:1]
    return " + ".join(chosen) or f"CPU: {describe_machine()['cpu']}"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
