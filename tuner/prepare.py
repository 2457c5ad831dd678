"""From a space file and flags to a study that can be run: config, load, folder, and what cannot act."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen import settings
from loadgen.config import BenchConfig
from loadgen.datasets.lengths import Lengths
from loadgen.errors import UsageError
from loadgen.progress import Progress
from tuner.config import TuneConfig, study_name
from tuner.errors import StudyError

STUDIES = Path("studies")
# What --quick stands for.
QUICK = {"noise_runs": 2, "finalists": 2, "rounds": 3}
# The load of a study where nothing else is said: near saturation of the embedded preset, prompts that fill budgets.
DEFAULT_LOAD: Mapping[str, Any] = {
    "mode": "closed",
    "concurrency": 16,
    "warmup": 2.0,
    "duration": 12.0,
    "input_tokens": "uniform:512,1024",
    "output_tokens": "32",
}
# The cache that this load fills: about twice one maximum batch of the embedded preset.
DEFAULT_PRESET, DEFAULT_CPU_GIB = "preset:tiny-llama", 0.15
# The server belongs to the study, not to the load.
NOT_LOAD = ("url", "server", "model_id", "model", "ready_timeout", "seed", "label")
SECTIONS = ("study", "server", "confirm", "load", "objective", "quality")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A study before its first launch."""

    config: TuneConfig
    load: BenchConfig
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name


def prepare(given: argparse.Namespace) -> Prepared:
    """The study of a space file and of flags. Raises UsageError, SpaceError."""
    config = read_config(given)
    load = load_of(config)
    config = with_derived_lengths(config, load)
    name = config.study.name or _name(config, load)
    return Prepared(config, load, STUDIES / name)


def stored(name: str | None, studies: Path = STUDIES) -> Prepared:
    """A study as its folder keeps it, the newest where none is named. Raises StudyError."""
    from tuner.study_folder import STUDY_FILE, StudyFolder

    if name is None:
        found = sorted(studies.glob(f"*/{STUDY_FILE}"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise StudyError(f"there is no study under {studies}/; `tgi-tune run` makes one")
        folder = found[-1].parent
    else:
        folder = studies / name
    content = StudyFolder(folder).read(STUDY_FILE)
    if "config" not in content:
        raise StudyError(f"{folder} holds no study")
    config = settings.load(TuneConfig, content["config"])
    return Prepared(config, load_of(config), folder)


def load_of(config: TuneConfig) -> BenchConfig:
    """The load of a study; requests are judged by the study's limits where it names no objectives of its own."""
    values = {**DEFAULT_LOAD, **config.load}
    file = values.pop("file", None)
    if file is not None:
        values = {**settings.read_toml(Path(file)), **config.load}
        values.pop("file")
    if not values.get("slo"):
        values["slo"] = tuple(
            f"{limit.metric} < {limit.max:.10g}"
            for limit in config.objective.limit
            if _of_a_request(limit.metric, limit.max)
        )
    return settings.load(BenchConfig, {**values, "model_id": config.server.model_id})


def read_config(given: argparse.Namespace) -> TuneConfig:
    """The study of a space file and of flags, which win. Raises UsageError naming the key."""
    content = settings.read_toml(given.space) if given.space is not None else {}
    sections: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        section = content.get(name, {})
        if not isinstance(section, dict):
            raise UsageError(f"`{name}` is {section!r}, but it is a section: [{name}]")
        sections[name] = dict(section)
    quick = QUICK if given.quick else {}
    flags = {
        "study": {
            "name": given.study,
            "trials": given.trials,
            "max_hours": given.max_hours,
            "seed": given.sampler_seed,
            "storage": given.storage,
            "sampler": given.sampler,
            "guide": given.guide,
            "reuse": given.reuse or None,
            "noise_runs": _first(given.noise_runs, quick.get("noise_runs")),
        },
        "server": {"model_id": given.model_id},
        "confirm": {
            "finalists": _first(given.finalists, quick.get("finalists")),
            "rounds": _first(given.rounds, quick.get("rounds")),
        },
        "load": {name: getattr(given, name, None) for name in BenchConfig.model_fields if name not in NOT_LOAD},
    }
    for name, values in flags.items():
        sections[name] |= {key: value for key, value in values.items() if value is not None}
    for key in NOT_LOAD:
        if key in sections["load"]:
            raise UsageError(f"`{key}` is no key of [load]: the server belongs to [server]")
    file = sections["load"].get("file")
    if isinstance(file, str) and given.space is not None and not Path(file).is_absolute():
        sections["load"]["file"] = str(given.space.parent / file)
    _fill_scarce(sections, is_derived=given.space is None)
    return settings.load(TuneConfig, {**content, **sections})


def _fill_scarce(sections: dict[str, dict[str, Any]], *, is_derived: bool) -> None:
    """On the embedded preset, where nothing is said, the cache is as scarce as the default load makes it."""
    server = sections["server"]
    if is_derived and server.get("model_id", DEFAULT_PRESET) == DEFAULT_PRESET and "fixed" not in server:
        server["fixed"] = {"cpu_memory_gib": DEFAULT_CPU_GIB}


def with_derived_lengths(config: TuneConfig, load: BenchConfig) -> TuneConfig:
    """Limits of prompt and answer from the load, where neither file nor model fixes them: budgets then have a scale."""
    fixed = config.server.fixed
    if load.workload != "synthetic" or "max_input_tokens" in fixed or "max_total_tokens" in fixed:
        return config
    longest_input = _longest(load.input_tokens)
    longest_output = _longest(load.output_tokens)
    if longest_input is None or longest_output is None:
        return config
    lengths = {"max_input_tokens": longest_input, "max_total_tokens": longest_input + longest_output}
    server = config.server.model_copy(update={"fixed": {**fixed, **lengths}})
    return config.model_copy(update={"server": server})


def cannot_act_in(config: TuneConfig, load: BenchConfig) -> dict[str, str]:
    """The searched knobs that cannot make a difference on this target, with the reason."""
    from tuner.derive import Demand, cannot_act, facts_of
    from tuner.identity import devices, params_of
    from tuner.space import SearchSpace, known_settings

    space = SearchSpace.of(params_of(config), config.forbid, known_settings())
    found = devices()
    facts = facts_of(config.server.model_id) if config.server.kind == "own" else None
    return cannot_act(space, config.server.fixed, Demand.of(load), facts, found)


def open_search(prepared: Prepared, progress: Progress, *, is_leader: bool = True) -> Any:
    """The search of a prepared study; its config is kept with it. Raises StudyError, SpaceError."""
    from tuner.early_stop import hopeless
    from tuner.evaluate import Bench
    from tuner.objective import Objective
    from tuner.search import Search
    from tuner.standing import ROUTER_ONLY, StandingShards
    from tuner.study_folder import STUDY_FILE, StudyFolder

    config, load = prepared.config, prepared.load
    objective = Objective.of(config.objective)
    timeout_s = config.server.ready_timeout_s
    searched = set(config.param) or {"max_waiting_tokens"} - set(config.server.fixed)
    stands = config.server.kind == "own" and bool(ROUTER_ONLY & searched)
    bench = Bench(
        load,
        timeout_s,
        progress,
        config.server,
        hopeless(objective.limits),
        StandingShards(timeout_s) if stands else None,
        with_steps=config.server.kind == "own",
    )
    inert = cannot_act_in(config, load)
    search = Search.open(prepared.folder, config, bench, inert=inert, is_leader=is_leader)
    if is_leader:
        StudyFolder(prepared.folder).update(STUDY_FILE, {"config": json.loads(config.model_dump_json(by_alias=True))})
    return search


def _name(config: TuneConfig, load: BenchConfig) -> str:
    from tuner.identity import digest_of, params_of

    return study_name(config.server.model_id, digest_of(config, params_of(config), load))


def _of_a_request(metric: str, limit: float | None) -> bool:
    from reports.per_request import request_metric_of

    return limit is not None and request_metric_of(metric, is_open_loop=False) is not None


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _longest(text: str | None) -> int | None:
    lengths = Lengths.parse(text) if text else None
    return lengths.longest if lengths is not None else None
