"""TuneConfig: a space file, typed. What a study searches, under which load, towards what, for how long."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tuner.expression import parse

_STRICT = ConfigDict(frozen=True, extra="forbid")

SamplerName = Literal["auto", "tpe", "gp", "random", "qmc", "grid", "nsga2", "coordinate"]
Kind = Literal["own", "tgi-docker", "tgi-launcher", "command"]

# Launches of a study where nothing is said; a space of more than `WIDE` parameters needs more, a guided search less.
TRIALS, WIDE_TRIALS, GUIDED_TRIALS, WIDE = 40, 80, 16, 6


class StudySection(BaseModel):
    """`[study]`: where it is kept, how it searches and when it ends."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = Field(
        None, description="Folder under studies/; made from model, space and load when absent."
    )
    storage: str = Field(
        "journal", description="journal, journal:PATH, sqlite:PATH, postgresql://..., mysql://..., or grpc://HOST:PORT."
    )
    trials: int | None = Field(
        None, ge=1, le=10_000, description="Configurations launched, the defaults included. Default 40, or 80 if wide."
    )
    max_hours: float | None = Field(None, gt=0, description="Stop searching after this long, whichever comes first.")
    seed: int = Field(0, ge=0, description="Of the sampler.")
    sampler: SamplerName = Field("auto", description="auto: opening moves, halving, then TPE.")
    guide: Literal["auto", "off", "rank", "gp"] = Field("auto", description="Whether the simulator proposes.")
    noise_runs: int = Field(4, ge=0, le=50, description="Runs of the defaults before the search; 0 for none.")
    patience: int | None = Field(None, ge=1, description="Stop after so many launches without a real improvement.")
    keep_all: bool = Field(False, description="Keep every value of `quantize` after the opening moves.")
    skip_doomed: bool = Field(True, description="Skip what must run out of memory, since something smaller did.")
    anchor_every: int = Field(10, ge=0, description="Measure the incumbent again each so many trials; 0 for never.")
    reuse: bool = Field(False, description="Take results of the same key from other studies on this device class.")
    mixed: bool = Field(False, description="Let workers of another device class, build or load join.")


class ServerSection(BaseModel):
    """`[server]`: what is launched."""

    model_config = _STRICT

    kind: Kind = Field("own", description="Whose launcher: the bundled reference server, a real TGI, any command.")
    model_id: str = Field("preset:tiny-llama", min_length=1, description="Hub id, local directory, or preset:NAME.")
    command: str | None = Field(
        None, description="kind command: the server; {setting} is replaced. tgi-launcher: the launcher's path."
    )
    image: str = Field("ghcr.io/huggingface/text-generation-inference:latest", description="kind tgi-docker.")
    volume: str | None = Field(None, description="kind tgi-docker: HOST_DIR:/data.")
    shm_size: str = Field("1g", description="kind tgi-docker: shared memory of the container.")
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="Devices of the server; none for a CPU.")
    ready_timeout_s: float = Field(300.0, gt=0, description="Seconds a launch may take.")
    fixed: dict[str, Any] = Field(default_factory=dict, description="Settings of every trial, the baseline included.")

    @model_validator(mode="after")
    def _has_command(self) -> "ServerSection":
        if self.kind == "command" and not self.command:
            raise ValueError("kind `command` needs `command`, the words that start the server")
        if self.kind in ("own", "tgi-docker") and self.command:
            raise ValueError(f"kind `{self.kind}` takes no `command`")
        return self


class LimitSection(BaseModel):
    """`[[objective.limit]]`: a bound that a configuration has to meet."""

    model_config = _STRICT

    metric: str
    max: float | None = Field(None, gt=0)
    min: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _one_bound(self) -> "LimitSection":
        if (self.max is None) == (self.min is None):
            raise ValueError(f"the limit on `{self.metric}` needs exactly one of `max` and `min`")
        return self


class ObjectiveSection(BaseModel):
    """`[objective]`: what is better, within which limits."""

    model_config = _STRICT

    maximize: str | tuple[str, str] | None = Field(
        None, description="Default: output_tokens_per_s, or goodput_rps with limits. Two make a Pareto search."
    )
    choose: Literal["knee", "first", "second"] = Field(
        "knee", description="Of a Pareto front: its knee, or the best in one of the two."
    )
    limit: tuple[LimitSection, ...] = ()


class ParamSection(BaseModel):
    """`[param]`: the values one launcher setting may take."""

    model_config = _STRICT

    type: Literal["int", "float", "bool", "choice"]
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = Field(None, gt=0)
    multiple_of: int | None = Field(None, gt=0)
    values: tuple[Any, ...] = ()
    when: str | None = None

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

    if_: str = Field(alias="if")

    @model_validator(mode="after")
    def _parses(self) -> "ForbidSection":
        parse(self.if_)
        return self


class ConfirmSection(BaseModel):
    """`[confirm]`: how often the best are launched again, in turns with the defaults, before they are believed."""

    model_config = _STRICT

    finalists: int = Field(3, ge=1, le=10, description="Best configurations relaunched beside the defaults.")
    rounds: int = Field(5, ge=0, le=50, description="Launches of each; 0 leaves the winner unconfirmed.")


class QualitySection(BaseModel):
    """`[quality]`: what a winner with other weights or another cache type has to keep of the defaults' answers."""

    model_config = _STRICT

    min_agreement: float = Field(0.90, ge=0, le=1, description="Least share of equal tokens among the first 64.")
    command: str | None = Field(None, description="Judges instead: run with the server's URL; exit 0 accepts.")


class TuneConfig(BaseModel):
    """One study. `load` holds the flags of `tgi-bench run` as TOML keys."""

    model_config = _STRICT

    study: StudySection = StudySection()
    server: ServerSection = ServerSection()
    load: dict[str, Any] = Field(default_factory=dict)
    objective: ObjectiveSection = ObjectiveSection()
    param: dict[str, ParamSection] = Field(default_factory=dict)
    forbid: tuple[ForbidSection, ...] = ()
    confirm: ConfirmSection = ConfirmSection()
    quality: QualitySection = QualitySection()

    @property
    def is_guided(self) -> bool:
        """Whether the simulator proposes, for one objective.

        It learns from the bundled server's step traces or from a TGI's metrics; of any other command it is not known
        whether it has these, so that there it is asked for by name.
        """
        is_one = not isinstance(self.objective.maximize, tuple)
        is_known = self.server.kind != "command" or self.study.guide != "auto"
        return self.study.guide != "off" and self.study.sampler == "auto" and is_known and is_one


def study_name(model_id: str, digest: str) -> str:
    """A folder name made from the model and a digest of space and load, so that the same command finds its study.

    >>> study_name("preset:tiny-llama", "a1b2c3d4e5")
    'tiny-llama-a1b2c3d4'
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model_id.removeprefix("preset:")).name).strip("-.") or "model"
    return f"{stem[:60]}-{digest[:8]}"
