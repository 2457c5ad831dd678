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
        None, description="Name of the folder under studies/. Default: the model and a digest of space and load."
    )
    storage: str = Field(
        "journal", description="journal, journal:PATH, sqlite:PATH, postgresql://..., mysql://..., or grpc://HOST:PORT."
    )
    trials: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description=f"Number of launches of the search, including the defaults. Default {TRIALS}, {WIDE_TRIALS} with "
        f"more than {WIDE} parameters, {SIMULATOR_TRIALS} while the simulator proposes.",
    )
    max_hours: float | None = Field(None, gt=0, description="End the search after this time, in hours.")
    seed: int = Field(0, ge=0, description="Seed of the sampler.")
    sampler: SamplerName = Field(
        "auto",
        description="auto: initial design, halving of its values, then TPE; for a profile's server a surrogate model.",
    )
    simulator: SimulatorUse = Field(
        "auto",
        validation_alias=AliasChoices("simulator", "guide"),
        description="Launches proposed by the simulator. gp: corrected by a Gaussian process of its errors. rank: "
        "without correction. auto: gp where step times are known. off: none.",
    )
    cost: str | None = Field(
        None,
        min_length=1,
        description="Cost file of `tgi-tune simulate calibrate --url`. With it the simulator proposes launches of a "
        "profile's server.",
    )
    noise_runs: int = Field(4, ge=0, le=50, description="Runs of the defaults before the search; 0 for none.")
    patience: int | None = Field(None, ge=1, description="Stop after this many launches without an improvement.")
    keep_all: bool = Field(False, description="Search every value of the initial design, not only the better half.")
    skip_dominated: bool = Field(
        True,
        validation_alias=AliasChoices("skip_dominated", "skip_doomed"),
        description="Skip configurations dominated by one that ran out of memory.",
    )
    drift_check_every: int = Field(
        10,
        ge=0,
        validation_alias=AliasChoices("drift_check_every", "anchor_every"),
        description="Measure the incumbent again after this many trials; 0 for never.",
    )
    reuse: bool = Field(
        False, description="Reuse results of equal settings from other studies of this load, build and device."
    )
    mixed: bool = Field(False, description="Accept workers with another device class, build or load.")

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
        description="own: the bundled server. tgi-docker, tgi-launcher: TGI. command: the server of `command`. "
        "profile: the server of `profile`.",
    )
    profile: str | None = Field(
        None, description="vllm, sglang, llamacpp, or the TOML file of another server's profile; sets `kind`."
    )
    model_id: str = Field("preset:tiny-llama", min_length=1, description="Hub id, local directory, or preset:NAME.")
    command: str | None = Field(
        None,
        description="kind command: command line of the server; {setting} is replaced. kind tgi-launcher: path of the "
        "launcher. kind profile: replaces the profile's command.",
    )
    image: str = Field(
        "ghcr.io/huggingface/text-generation-inference:latest", description="kind tgi-docker: container image."
    )
    volume: str | None = Field(None, description="kind tgi-docker: HOST_DIR:/data.")
    shm_size: str = Field("1g", description="kind tgi-docker: shared memory of the container.")
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="GPU indices of the server; empty: CPU.")
    ready_timeout_s: float = Field(300.0, gt=0, description="Longest time until the server is ready, in seconds.")
    fixed: dict[str, Any] = Field(default_factory=dict, description="Settings of every trial, including the baseline.")

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
    min: float | None = Field(None, gt=0, description="Smallest value that meets the limit. Exactly one of the two.")

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
        description="Metric to improve, or two metrics for a Pareto search. Default output_tokens_per_s, with limits "
        "goodput_rps.",
    )
    choose: Literal["knee", "first", "second"] = Field(
        "knee", description="On a Pareto front: the knee, or the best in one objective."
    )
    limit: tuple[LimitSection, ...] = Field((), description="Bounds: [[objective.limit]], repeated.")


class ParamSection(BaseModel):
    """`[param]`: the values one launcher setting may take."""

    model_config = _STRICT

    type: Literal["int", "float", "bool", "choice"] = Field(description="Type of the values.")
    low: float | None = Field(None, description="Smallest value of an int or float.")
    high: float | None = Field(None, description="Largest value of an int or float.")
    log: bool = Field(False, description="Whether values are drawn on a logarithmic scale; needs low above 0.")
    step: float | None = Field(None, gt=0, description="Distance between the values of a float.")
    multiple_of: int | None = Field(None, gt=0, description="Every value of an int is a multiple of this.")
    values: tuple[Any, ...] = Field(
        (), description="Values of a choice; { value = ..., model_id = ... } also names a prepared checkpoint."
    )
    when: str | None = Field(None, description="The parameter is searched only where this expression holds.")

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

    if_: str = Field(alias="if", description="Settings for which this expression holds are not launched.")

    @model_validator(mode="after")
    def _parses(self) -> "ForbidSection":
        parse(self.if_)
        return self


class ConfirmSection(BaseModel):
    """`[confirm]`: fresh launches of the finalists and the defaults, in alternating order."""

    model_config = _STRICT

    finalists: int = Field(3, ge=1, le=10, description="Best configurations to relaunch, as well as the defaults.")
    rounds: int = Field(5, ge=0, le=50, description="Launches of each; 0 leaves the winner unconfirmed.")


class QualitySection(BaseModel):
    """`[quality]`: required agreement with the answers of the defaults, for winners with other weights or K/V type."""

    model_config = _STRICT

    min_agreement: float = Field(0.90, ge=0, le=1, description="Smallest fraction of equal tokens among the first 64.")
    command: str | None = Field(
        None, description="Command that decides instead: it receives the server's URL, and exit code 0 accepts."
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
        default_factory=dict, description="Searched settings, by name. Default: those that the server marks as tunable."
    )
    forbid: tuple[ForbidSection, ...] = Field((), description="Combinations known to be impossible.")
    confirm: ConfirmSection = Field(ConfirmSection(), description="Launches that decide between the finalists.")
    quality: QualitySection = Field(QualitySection(), description="How much the answers may change.")

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
