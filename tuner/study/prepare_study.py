"""Prepares a study: config, load and folder, from a space file and flags, from a study's folder, or from a storage."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.config.objectives import objectives_of
from loadgen.config.profiles import with_profile
from loadgen.config.workload_settings import FILE_WORKLOADS, TRACE_WORKLOADS
from loadgen.errors import UsageError
from loadgen.workloads.workload_files import check_files
from tuner.config import STUDY_NAME, TuneConfig, study_name
from tuner.errors import StudyError
from tuner.servers.model_path import check_model_path
from tuner.servers.select import server_of
from tuner.study.space_file import read_space

STUDIES = Path("studies")
# The values of --quick.
QUICK = {"noise_runs": 2, "finalists": 2, "rounds": 3}
# The default load of a study. It nearly saturates the embedded preset, and its prompts fill the prefill budget.
DEFAULT_LOAD: Mapping[str, Any] = {
    "mode": "closed",
    "concurrency": 16,
    "warmup": 2.0,
    "duration": 12.0,
    "input_tokens": "uniform:512,1024",
    "output_tokens": "32",
}
DEFAULT_PRESET = "preset:tiny-llama"
# Keys of a load that a study sets itself.
NOT_LOAD = (
    *("url", "replicas", "balance", "metrics_url", "server", "model_id", "model", "ready_timeout", "seed", "label"),
    *("file_cache", "model_files"),
)
SECTIONS = ("study", "server", "confirm", "load", "objective", "quality")


@dataclass(frozen=True, slots=True)
class PreparedStudy:
    """Config, load and folder of a study."""

    config: TuneConfig
    load: BenchConfig
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name


def prepare(args: argparse.Namespace, space: Mapping[str, Any] | None = None) -> PreparedStudy:
    """The study of a space and flags, after a check of the files of load and model. Raises UsageError, SpaceError.

    space: sections of a space, instead of the file in `args`.
    """
    config = read_config(args, space)
    load = load_of(config)
    check_files(load)
    check_model_path(config.server)
    config = with_implied(config, load)
    name = config.study.name or _name(config, load)
    return PreparedStudy(config, load, STUDIES / name)


def stored(name: str | None, studies: Path = STUDIES) -> PreparedStudy:
    """The study of a folder, the newest if no name is given. Raises StudyError."""
    from tuner.study.study_folder import STUDY_FILE, StudyFolder

    if name is None:
        found = sorted(studies.glob(f"*/{STUDY_FILE}"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise StudyError(f"there is no study under {studies}/: create one with `tgi-tune run`")
        folder = found[-1].parent
    else:
        folder = studies / checked_name(name)
    content = StudyFolder(folder).read(STUDY_FILE)
    if "config" not in content:
        raise StudyError(f"{folder} has no study")
    config = parsing.load(TuneConfig, content["config"])
    return PreparedStudy(config, load_of(config), folder)


def stored_in(storage: str, name: str | None, studies: Path = STUDIES, *, is_allowed: bool = False) -> PreparedStudy:
    """The study of a storage, the newest if no name is given. Creates its folder on this machine.

    Raises StudyError, also if the study has commands or paths and these are not allowed.
    """
    from tuner.study.optuna_study import stored_study
    from tuner.study.shared_storage.foreign_config import check_allowed
    from tuner.study.study_folder import STUDY_FILE, StudyFolder

    found, content = stored_study(storage, name, studies)
    config = parsing.load(TuneConfig, content["config"])
    files = StudyFolder(studies / checked_name(found))
    own = files.read(STUDY_FILE)
    known = parsing.load(TuneConfig, own["config"]) if "config" in own else None
    check_allowed(found, config, known, is_allowed=is_allowed)
    if not files.identity():
        files.update(STUDY_FILE, {"identity": content["identity"], "config": content["config"]})
    section = config.study.model_copy(update={"storage": storage, "name": found})
    config = config.model_copy(update={"study": section})
    return PreparedStudy(config, load_of(config), files.path)


def checked_name(name: str) -> str:
    """The name of a study, which is its folder's name. Raises StudyError if it is not a plain name."""
    if not STUDY_NAME.fullmatch(name):
        raise StudyError(f"the study's name {name!r} is not a plain folder name: {STUDY_NAME.pattern}")
    return name


def load_of(config: TuneConfig) -> BenchConfig:
    """The load of a study. Without its own objectives, the study's limits judge its requests."""
    own = with_profile(config.load)
    values = {**_defaults_for(own.get("workload")), **own}
    file = values.pop("file", None)
    if file is not None:
        values = {**parsing.read_toml(Path(file)), **config.load}
        values.pop("file")
    if not values.get("slo"):
        values["slo"] = tuple(
            f"{limit.metric} < {limit.max:.10g}"
            for limit in config.objective.limit
            if _is_request_metric(limit.metric, limit.max)
        )
    api = server_of(config.server).api
    return parsing.load(BenchConfig, {"api": api, **values, "model_id": config.server.model_id})


def _defaults_for(workload: object) -> dict[str, Any]:
    """The default load without the lengths that a workload defines itself."""
    defined = ["input_tokens"] * (workload in (*FILE_WORKLOADS, *TRACE_WORKLOADS))
    defined += ["output_tokens"] * (workload in TRACE_WORKLOADS)
    return {name: value for name, value in DEFAULT_LOAD.items() if name not in defined}


def read_config(args: argparse.Namespace, space: Mapping[str, Any] | None = None) -> TuneConfig:
    """The config of a space and flags. Flags take precedence. Raises UsageError with the key.

    space: sections of a space, instead of the file in `args`.
    """
    content = dict(space) if space is not None else read_space(args.space) if args.space is not None else {}
    sections: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        section = content.get(name, {})
        if not isinstance(section, dict):
            raise UsageError(f"`{name}` is {section!r}, but must be a section: [{name}]")
        sections[name] = dict(section)
    quick = QUICK if args.quick else {}
    flags = {
        "study": {
            "name": args.study,
            "trials": args.trials,
            "max_hours": args.max_hours,
            "seed": args.sampler_seed,
            "storage": args.storage,
            "sampler": args.sampler,
            "simulator": args.simulator,
            "cost": args.cost,
            "reuse": args.reuse or None,
            "noise_runs": _first(args.noise_runs, quick.get("noise_runs")),
        },
        "server": {"model_id": args.model_id, "profile": args.server_profile},
        "confirm": {
            "finalists": _first(args.finalists, quick.get("finalists")),
            "rounds": _first(args.rounds, quick.get("rounds")),
        },
        "load": {name: getattr(args, name, None) for name in BenchConfig.model_fields if name not in NOT_LOAD},
    }
    for name, values in flags.items():
        sections[name] |= {key: value for key, value in values.items() if value is not None}
    for key in NOT_LOAD:
        if key in sections["load"]:
            raise UsageError(f"`{key}` is not a key of [load]: a study sets it from [server] or [study]")
    _limit_by_objectives(sections, getattr(args, "slo", None) or ())
    _limit_memory(sections, is_derived=args.space is None and space is None)
    try:
        return parsing.load(TuneConfig, {**content, **sections})
    except UsageError as error:
        if args.space is not None and not _is_valid(content):
            raise UsageError(f"{args.space}: {error}") from None
        raise


def _is_valid(content: Mapping[str, Any]) -> bool:
    try:
        parsing.load(TuneConfig, content)
    except UsageError:
        return False
    return True


def _limit_by_objectives(sections: dict[str, dict[str, Any]], texts: Sequence[str]) -> None:
    """Objectives of the command line are the limits of a study whose file has none. Raises UsageError."""
    if texts and not sections["objective"].get("limit"):
        try:
            sections["objective"]["limit"] = objectives_of(texts)
        except ValueError as error:
            raise UsageError(f"`slo`: {error}") from None


def _limit_memory(sections: dict[str, dict[str, Any]], *, is_derived: bool) -> None:
    """Without a space file, limit the memory of the embedded preset, so that the default load fills its K/V pool."""
    server = sections["server"]
    is_preset = server.get("model_id", DEFAULT_PRESET) == DEFAULT_PRESET and "profile" not in server
    if is_derived and is_preset and "fixed" not in server:
        from tuner.servers.tgi.derive import PRESET_MEMORY

        server["fixed"] = dict(PRESET_MEMORY)


def with_implied(config: TuneConfig, load: BenchConfig) -> TuneConfig:
    """The config with the fixed settings that follow from the load."""
    implied = server_of(config.server).implied(load)
    server = config.server.model_copy(update={"fixed": {**config.server.fixed, **implied}})
    return config.model_copy(update={"server": server}) if implied else config


def without_effect(config: TuneConfig, load: BenchConfig) -> dict[str, str]:
    """The settings without effect on this target: name to reason."""
    from tuner.space.search_space import SearchSpace
    from tuner.study.identity import params_of

    server = server_of(config.server)
    return server.without_effect(SearchSpace.of(params_of(config), config.forbid, server.known), load)


def _name(config: TuneConfig, load: BenchConfig) -> str:
    from tuner.study.identity import digest_of, params_of

    return study_name(config.server.model_id, digest_of(config, params_of(config), load))


def _is_request_metric(metric: str, limit: float | None) -> bool:
    from reports.metrics.requests.per_request import request_metric_of

    return limit is not None and request_metric_of(metric, is_open_loop=False) is not None


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
