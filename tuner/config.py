"""TuneConfig: a space file, typed. What a study searches, under which load, towards what, for how long."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tuner.expression import parse

_STRICT = ConfigDict(frozen=True, extra="forbid")


class StudySection(BaseModel):
    """`[study]`: where it is kept and when it ends."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = Field(
        None, description="Folder under studies/; made from model, space and load when absent."
    )
    trials: int = Field(20, ge=1, le=10_000, description="Configurations launched, the defaults included.")
    max_hours: float | None = Field(None, gt=0, description="Stop searching after this long, whichever comes first.")
    seed: int = Field(0, ge=0, description="Of the sampler.")


class ServerSection(BaseModel):
    """`[server]`: what is launched."""

    model_config = _STRICT

    kind: Literal["own"] = Field("own", description="Whose launcher: the bundled reference server.")
    model_id: str = Field("preset:tiny-llama", min_length=1, description="Hub id, local directory, or preset:NAME.")
    ready_timeout_s: float = Field(300.0, gt=0, description="Seconds a launch may take.")
    fixed: dict[str, Any] = Field(default_factory=dict, description="Settings of every trial, the baseline included.")


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

    maximize: str | None = Field(None, description="Default: output_tokens_per_s, or goodput_rps with limits.")
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

    finalists: int = Field(2, ge=1, le=10, description="Best configurations relaunched beside the defaults.")
    rounds: int = Field(3, ge=0, le=50, description="Launches of each; 0 leaves the winner unconfirmed.")


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


def study_name(model_id: str, digest: str) -> str:
    """A folder name made from the model and a digest of space and load, so that the same command finds its study.

    >>> study_name("preset:tiny-llama", "a1b2c3d4e5")
    'tiny-llama-a1b2c3d4'
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model_id.removeprefix("preset:")).name).strip("-.") or "model"
    return f"{stem[:60]}-{digest[:8]}"
