"""The identity of a study: space, load, server build and device class, as SHA-256 digests of JSON or as text."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.target.machine import describe_machine, gpu_names
from tuner.config import ParamSection, TuneConfig
from tuner.errors import StudyError
from tuner.servers.select import server_of

SPACE, RANGES, LOAD, BUILD, DEVICE = "space", "ranges", "load", "build", "device"


def params_of(config: TuneConfig) -> Mapping[str, ParamSection]:
    """The searched parameters: those of the file, or the server's default space."""
    return config.param or server_of(config.server).params()


def identity_of(config: TuneConfig, params: Mapping[str, ParamSection], load: BenchConfig) -> dict[str, str]:
    """The identity, by part. In a study `space` is constant, and `ranges` can change."""
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
        BUILD: server_of(config.server).build,
        DEVICE: device_class(config.server.gpus),
    }


def digest_of(config: TuneConfig, params: Mapping[str, ParamSection], load: BenchConfig) -> str:
    """A digest of space, ranges and load, for the name of an unnamed study."""
    found = identity_of(config, params, load)
    return digest([found[SPACE], found[RANGES], found[LOAD]])


def check_comparable(own: Mapping[str, str], study: Mapping[str, str], *, is_mixed: bool) -> None:
    """Raises StudyError with the parts in which this machine differs from the study, unless the study is mixed."""
    names = {DEVICE: "device class", BUILD: "server build", LOAD: "load"}
    differing = [f"{text} {own[key]!r}, not {study[key]!r}" for key, text in names.items() if own[key] != study[key]]
    if differing and not is_mixed:
        raise StudyError(f"this worker has {'; '.join(differing)}: set `mixed = true` to accept it")


def device_class(gpus: tuple[int, ...]) -> str:
    """The names of the GPUs, or of the CPU. Results of different classes are not comparable."""
    names = gpu_names()
    chosen = [names[index] for index in gpus if index < len(names)] or names[:1]
    return " + ".join(chosen) or f"CPU: {describe_machine()['cpu']}"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
