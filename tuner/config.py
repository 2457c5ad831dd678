"""TuneConfig: the typed sections of a space file."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from tuner.space.expression import parse

_STRICT = ConfigDict(frozen=True, extra="forbid")

SamplerName = Literal["auto", "tpe", "gp", "random", "qmc", "grid", "nsga2", "coordinate"]
SimulatorUse = Literal["auto", "off", "rank", "gp"]
Kind = Literal["own", "tgi-docker", "tgi-launcher", "command", "profile"]

# Name of a study and of its folder.
STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Default number of launches: of a study, with more than `WIDE` parameters, and while the simulator proposes.
TRIALS, WIDE_TRIALS, SIMULATOR_TRIALS, WIDE = 40, 80, 16, 6


class StudySection(BaseModel):
    """`[study]`: storage, sampler and end of the study."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=rf"^{STUDY_NAME.pattern}$")] | None = Field(
        None,
        description="Name of the study and of its folder under studies/. Default: name of the model, and a digest of "
        "the space and the load, so that the same file continues the same study.",
    )
    storage: str = Field(
        "journal",
        description="Where the trials are stored. journal: a file in the study's folder; journal:PATH: another file. "
        "sqlite:PATH, postgresql://..., mysql://...: a database, which workers on several machines can share. "
        "grpc://HOST:PORT: the address of `tgi-tune storage`.",
    )
    trials: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description=f"Number of launches of the search, including the defaults. Default {TRIALS}, {WIDE_TRIALS} with "
        f"more than {WIDE} parameters, {SIMULATOR_TRIALS} while the simulator proposes.",
    )
    max_hours: float | None = Field(
        None,
        gt=0,
        description="Longest duration of the search, in hours, without initial design and confirmation. Default: no "
        "limit.",
    )
    seed: int = Field(
        0, ge=0, description="Seed of the sampler. Another seed gives other configurations in the search."
    )
    sampler: SamplerName = Field(
        "auto",
        description="Method that selects the configurations. auto: an initial design, then TPE over the better half "
        "of its values; for a server of a profile, a surrogate model. tpe, gp, random, qmc, nsga2: Optuna's samplers. "
        "grid: every combination. coordinate: one parameter at a time, from the best configuration so far.",
    )
    simulator: SimulatorUse = Field(
        "auto",
        validation_alias=AliasChoices("simulator", "guide"),
        description="Whether the simulator predicts many configurations and proposes the best of them as launches. "
        "rank: by its predictions. gp: by predictions that a Gaussian process corrects for the errors so far. auto: "
        "gp if step times are known, otherwise off. off: the sampler selects all launches.",
    )
    cost: str | None = Field(
        None,
        min_length=1,
        description="File of step costs, written by `tgi-tune simulate calibrate --url`. It allows the simulator to "
        "propose launches of a server of a profile.",
    )
    noise_runs: int = Field(
        4,
        ge=0,
        le=50,
        description="Number of launches of the defaults before the search. They measure the deviation between equal "
        "launches. 0: none; the deviation is then unknown.",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="End the search after this number of launches in a row without an improvement larger than noise. "
        "Default: no such limit.",
    )
    keep_all: bool = Field(
        False,
        description="true: search all values of the initial design. false: search the better half of them after the "
        "initial design.",
    )
    skip_dominated: bool = Field(
        True,
        validation_alias=AliasChoices("skip_dominated", "skip_doomed"),
        description="Do not launch a configuration that needs at least as much memory as one that ran out of memory.",
    )
    drift_check_every: int = Field(
        10,
        ge=0,
        validation_alias=AliasChoices("drift_check_every", "anchor_every"),
        description="Number of launches between drift checks. Every check launches the same configuration, the best "
        "one at the first check, to detect whether the machine became faster or slower. 0: no checks.",
    )
    reuse: bool = Field(
        False,
        description="Use results of other studies for equal settings instead of a launch. These studies need the same "
        "load, build and device.",
    )
    mixed: bool = Field(
        False,
        description="Accept workers with another device class, build or load. The study compares their results "
        "although these differences may change them.",
    )

    def num_trials(self, num_parameters: int) -> int:
        """Number of launches: `trials`, or a default for the size of the space."""
        if self.trials is not None:
            return self.trials
        return WIDE_TRIALS if num_parameters > WIDE else TRIALS


class ServerSection(BaseModel):
    """`[server]`: the server to launch."""

    model_config = _STRICT

    kind: Kind = Field(
        "own",
        description="Server to launch. own: the bundled server. tgi-docker: TGI in a container of `image`. "
        "tgi-launcher: TGI's launcher on this machine. command: the command line in `command`. profile: the server "
        "of `profile`.",
    )
    profile: str | None = Field(
        None, description="Profile of the server: vllm, sglang, llamacpp, or a TOML file. Sets `kind` to profile."
    )
    model_id: str = Field(
        "preset:tiny-llama", min_length=1, description="Model to serve: hub id, local directory, or preset:NAME."
    )
    command: str | None = Field(
        None,
        description="kind command: command line of the server; {setting} is replaced by its value. kind tgi-launcher: "
        "path of the launcher. kind profile: command line to use instead of the profile's.",
    )
    image: str = Field(
        "ghcr.io/huggingface/text-generation-inference:latest", description="kind tgi-docker: container image."
    )
    volume: str | None = Field(
        None, description="kind tgi-docker: directory of the host that is mounted as /data, as HOST_DIR:/data."
    )
    shm_size: str = Field("1g", description="kind tgi-docker: size of the container's shared memory, such as 1g.")
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="Indices of the GPUs that the server uses. Empty: the server runs on the CPU."
    )
    ready_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Longest time from the launch until the server is ready, in seconds. A slower launch fails.",
    )
    fixed: dict[str, Any] = Field(
        default_factory=dict, description="Settings of all launches, also of the defaults. They are not searched."
    )

    @model_validator(mode="before")
    @classmethod
    def _kind_of_profile(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("profile") is not None:
            return {"kind": "profile", **values}
        return values

    @model_validator(mode="after")
    def _has_command(self) -> "ServerSection":
        if (self.kind == "profile") != (self.profile is not None):
            raise ValueError(
                f"`kind` is {self.kind} and `profile` is {self.profile!r}: set `profile` exactly if `kind` is profile"
            )
        if self.kind == "command" and not self.command:
            raise ValueError("kind `command` needs `command`, the command line of the server")
        if self.kind in ("own", "tgi-docker") and self.command:
            raise ValueError(f"kind `{self.kind}` takes no `command`")
        return self


class LimitSection(BaseModel):
    """`[[objective.limit]]`: a bound on one metric."""

    model_config = _STRICT

    metric: str = Field(description="Metric that the limit bounds, such as ttft_p95_ms.")
    max: float | None = Field(None, gt=0, description="Largest value that meets the limit.")
    min: float | None = Field(
        None, gt=0, description="Smallest value that meets the limit. A limit has either `max` or `min`."
    )

    @model_validator(mode="after")
    def _one_bound(self) -> "LimitSection":
        if (self.max is None) == (self.min is None):
            raise ValueError(f"the limit on `{self.metric}` needs exactly one of `max` and `min`")
        return self


class ObjectiveSection(BaseModel):
    """`[objective]`: one or two metrics to improve, and limits."""

    model_config = _STRICT

    maximize: str | tuple[str, str] | None = Field(
        None,
        description="Metric to improve (a latency is minimized), or two metrics for a Pareto search. Default: "
        "goodput_rps if there are limits, otherwise output_tokens_per_s.",
    )
    choose: Literal["knee", "first", "second"] = Field(
        "knee",
        description="Winner of a Pareto search. knee: the largest geometric mean of both metrics. first, second: the "
        "best value of that metric alone.",
    )
    limit: tuple[LimitSection, ...] = Field(
        (),
        description="Bounds that a configuration must meet: one [[objective.limit]] for each. Default: the objectives "
        "of --slo.",
    )


class ParamSection(BaseModel):
    """`[param]`: the values one launcher setting may take."""

    model_config = _STRICT

    type: Literal["int", "float", "bool", "choice"] = Field(
        description="Type of the values. int, float: a range from `low` to `high`. choice: one of `values`."
    )
    low: float | None = Field(None, description="Smallest value of an int or float.")
    high: float | None = Field(None, description="Largest value of an int or float.")
    log: bool = Field(
        False,
        description="true: search the range on a logarithmic scale. `low` must be above 0.",
    )
    step: float | None = Field(None, gt=0, description="Distance between the values of a float. Default: any value.")
    multiple_of: int | None = Field(None, gt=0, description="Only multiples of this number are values of an int.")
    values: tuple[Any, ...] = Field(
        (),
        description="Values of a choice. { value = ..., model_id = ... } is a value with another checkpoint, such as "
        "an already quantized one.",
    )
    when: str | None = Field(
        None, description="Expression over other settings. If it is false, the parameter is left out."
    )

    @model_validator(mode="after")
    def _complete(self) -> "ParamSection":
        if self.type in ("int", "float"):
            if self.low is None or self.high is None or self.low > self.high:
                raise ValueError(f"type `{self.type}` needs `low` <= `high`. Given: {self.low} and {self.high}")
            if self.log and self.low <= 0:
                raise ValueError(f"`log` needs `low` > 0. Given: {self.low}")
        elif self.low is not None or self.high is not None:
            raise ValueError(f"type `{self.type}` takes no `low` and `high`")
        if self.type == "choice" and not self.values:
            raise ValueError("type `choice` needs `values`")
        for value in self.values:
            if isinstance(value, dict) and value.keys() != {"value", "model_id"}:
                raise ValueError(f"a prepared checkpoint is {{ value = ..., model_id = ... }}. Given: {value}")
        if self.when is not None:
            parse(self.when)
        return self


class ForbidSection(BaseModel):
    """`[[forbid]]`: a combination known to be impossible."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    if_: str = Field(
        alias="if", description="Expression over settings. Configurations for which it is true are not launched."
    )

    @model_validator(mode="after")
    def _parses(self) -> "ForbidSection":
        parse(self.if_)
        return self


class ConfirmSection(BaseModel):
    """`[confirm]`: fresh launches of the finalists and the defaults, in alternating order."""

    model_config = _STRICT

    finalists: int = Field(
        3, ge=1, le=10, description="Number of best configurations that are launched again, with the defaults."
    )
    rounds: int = Field(
        5,
        ge=0,
        le=50,
        description="Number of launches of each finalist and of the defaults. More launches show a smaller gain. 0: no "
        "confirmation.",
    )


class QualitySection(BaseModel):
    """`[quality]`: required agreement with the answers of the defaults, for winners with other weights or K/V type."""

    model_config = _STRICT

    min_agreement: float = Field(
        0.90,
        ge=0,
        le=1,
        description="Smallest accepted fraction of tokens that are equal to the tokens of the defaults, over the "
        "first 64 tokens of each answer. A finalist below it is rejected.",
    )
    command: str | None = Field(
        None,
        description="Command that decides instead of `min_agreement`. Its last argument is the server's URL; exit "
        "code 0 accepts the finalist.",
    )


class TuneConfig(BaseModel):
    """One study. The keys of `load` are the flags of `tgi-bench run`."""

    model_config = _STRICT

    study: StudySection = Field(StudySection(), description="Storage, sampler and end of the study.")
    server: ServerSection = Field(ServerSection(), description="The server that is launched.")
    load: dict[str, Any] = Field(
        default_factory=dict, description="The load of every launch; `file` names a TOML file that holds it."
    )
    objective: ObjectiveSection = Field(ObjectiveSection(), description="Metrics to improve, and limits.")
    param: dict[str, ParamSection] = Field(
        default_factory=dict, description="Searched settings, by name. Default: all that the server marks as tunable."
    )
    forbid: tuple[ForbidSection, ...] = Field((), description="Combinations known to be impossible.")
    confirm: ConfirmSection = Field(
        ConfirmSection(), description="Repeated launches that decide between the best configurations and the defaults."
    )
    quality: QualitySection = Field(
        QualitySection(), description="Largest accepted difference between the answers of a winner and of the defaults."
    )

    @model_validator(mode="after")
    def _simulator_has_costs(self) -> "TuneConfig":
        study = self.study
        if study.cost is not None and self.server.kind != "profile":
            raise ValueError(
                "`cost` is for a server of a profile: the costs of other servers are fitted to the study's own launches"
            )
        if study.cost is None and self.server.kind == "profile" and study.simulator in ("rank", "gp"):
            raise ValueError(
                f"`simulator` is {study.simulator}, but a profile's server reports no step times: give `cost`, "
                "a file of `tgi-tune simulate calibrate --url`"
            )
        return self

    @property
    def uses_simulator(self) -> bool:
        """Whether the simulator proposes launches. It needs one objective, sampler `auto` and step times.

        Step times come from `cost` for a profile's server, else from the bundled server's step traces or from TGI's
        metrics. A server of kind `command` may have neither, so there `simulator` must be set explicitly.
        """
        if self.study.simulator == "off" or not self._has_proposer:
            return False
        if self.server.kind == "profile":
            return self.study.cost is not None
        return self.server.kind != "command" or self.study.simulator != "auto"

    @property
    def uses_surrogate(self) -> bool:
        """Whether a surrogate model of the results proposes launches of a profile's server."""
        return self._has_proposer and self.server.kind == "profile" and not self.uses_simulator

    @property
    def _has_proposer(self) -> bool:
        """Whether a proposer may choose the launches: with one objective and sampler `auto`."""
        return self.study.sampler == "auto" and not isinstance(self.objective.maximize, tuple)


def study_name(model_id: str, digest: str) -> str:
    """The folder of an unnamed study: model and digest, so the same command continues the study.

    >>> study_name("preset:tiny-llama", "a1b2c3d4e5")
    'tiny-llama-a1b2c3d4'
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model_id.removeprefix("preset:")).name).strip("-.") or "model"
    return f"{stem[:60]}-{digest[:8]}"
