"""A server profile: the settings, launch command and log lines of a server program, declared in TOML."""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tuner.config import ParamSection
from tuner.space.expression import Expression, parse
from tuner.space.satisfiable import outcomes

_STRICT = ConfigDict(frozen=True, extra="forbid")

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
LogCause = Literal["memory", "no_cache", "flag", "crash"]
# Roles of a setting in the simulator's batching rule, and the type that each role requires.
Meaning = Literal["slots", "prefill_tokens", "prefill_prompts", "steps_between", "mixes_prefill"]
MEANING_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("slots", "prefill_tokens", "prefill_prompts", "steps_between"), "int"),
    "mixes_prefill": "bool",
}


class SettingSection(BaseModel):
    """`[setting.NAME]`: one setting of the server, with its flag or environment variable."""

    model_config = _STRICT

    type: Literal["int", "float", "bool", "choice", "text"] = Field(description="Type of the value.")
    flag: str | None = Field(None, pattern=r"^-{1,2}[A-Za-z]", description="Flag that takes the value.")
    flag_true: str | None = Field(None, description="type bool: flag for true. Default: no flag.")
    flag_false: str | None = Field(None, description="type bool: flag for false. Default: no flag.")
    env: str | None = Field(None, pattern=r"^[A-Z][A-Z0-9_]*$", description="Environment variable of the value.")
    low: float | None = Field(None, description="Smallest value of the default range.")
    high: float | None = Field(None, description="Largest value of the default range.")
    log: bool = Field(False, description="Search the range on a logarithmic scale.")
    step: float | None = Field(None, gt=0, description="Distance between the values of a float.")
    multiple_of: int | None = Field(None, gt=0, description="Every value of an int is a multiple of this.")
    values: tuple[Any, ...] = Field((), description="Values of a choice.")
    default: Any = Field(None, description="The server's default, if it is the same on every machine.")
    when: str | None = Field(None, description="The setting is searched only if this expression holds.")
    searched: bool = Field(True, description="Whether a study without [param] searches the setting.")
    changes_answers: bool = Field(
        False, description="Whether the value changes answers, so that the quality guard compares them."
    )
    meaning: Meaning | None = Field(
        None, description="Role of the setting in the simulator's batching rule; docs/simulate.md explains the roles."
    )
    help: str = Field("", description="One sentence for `tgi-tune check` and docs/profiles.md.")

    @model_validator(mode="after")
    def _has_flag_or_variable(self) -> "SettingSection":
        if self.type == "bool":
            if self.flag is not None:
                raise ValueError("type `bool` takes `flag_true` and `flag_false`, not `flag`")
            if not (self.flag_true or self.flag_false or self.env):
                raise ValueError("type `bool` needs `flag_true`, `flag_false` or `env`")
        elif self.flag_true or self.flag_false:
            raise ValueError(f"type `{self.type}` takes `flag` or `env`, not `flag_true` and `flag_false`")
        elif (self.flag is None) == (self.env is None):
            raise ValueError(f"type `{self.type}` needs exactly one of `flag` and `env`")
        if self.meaning is not None and self.type != MEANING_TYPES[self.meaning]:
            raise ValueError(f"`meaning` {self.meaning} needs type `{MEANING_TYPES[self.meaning]}`, not `{self.type}`")
        if self.type != "text" and self.searched:
            self.param()
        if self.default is not None and (reason := self.mismatch(self.default)):
            raise ValueError(f"`default` is {self.default!r}: {reason}")
        return self

    def mismatch(self, value: Any) -> str:
        """The reason why a value has the wrong type or is not one of the choices; empty if it is valid."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        match self.type:
            case "bool":
                return "" if isinstance(value, bool) else "must be true or false"
            case "int":
                return "" if is_number and isinstance(value, int) else "must be an integer"
            case "float":
                return "" if is_number else "must be a number"
            case "choice":
                is_known = value in self.values or not self.values
                return "" if is_known else f"must be one of {', '.join(map(str, self.values))}"
        return "" if isinstance(value, str) else "must be a string"

    @property
    def candidates(self) -> tuple[Any, ...]:
        """Values at which conditions are tested: every choice, or the ends of the range; empty without a range."""
        if self.type == "bool":
            return (False, True)
        ends = (self.low, self.high) if self.low is not None and self.high is not None else ()
        return self.values or ends

    def param(self) -> ParamSection:
        """The setting as a searched parameter."""
        assert self.type != "text", "a setting of type text is not searched"
        return ParamSection(
            type=self.type,
            low=self.low,
            high=self.high,
            log=self.log,
            step=self.step,
            multiple_of=self.multiple_of,
            values=self.values,
            when=self.when,
        )


class ProfileForbid(BaseModel):
    """`[[forbid]]`: a combination that the server refuses. It applies only if each setting has a value or a default."""

    model_config = _STRICT

    when: str

    @model_validator(mode="after")
    def _parses(self) -> "ProfileForbid":
        parse(self.when)
        return self


class FailureSection(BaseModel):
    """`[[failure]]`: a pattern in the log of a failed server, its cause, and the settings that make it worse."""

    model_config = _STRICT

    match: str = Field(description="Case-insensitive regular expression, searched in the last lines of the log.")
    cause: LogCause = Field(description="memory, no_cache, flag or crash.")
    grows_with: tuple[Name, ...] = Field((), description="Settings whose equal or larger values also fail.")
    shrinks_with: tuple[Name, ...] = Field((), description="Settings whose equal or smaller values also fail.")

    @model_validator(mode="after")
    def _compiles(self) -> "FailureSection":
        _compiled(self.match)
        return self


class ServerProfile(BaseModel):
    """One server program."""

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")] = Field(description="Name in studies and exports.")
    command: str = Field(
        min_length=1, description="Command line that starts the server; {port} and {model} are replaced."
    )
    environment: dict[str, str] = Field(default_factory=dict, description="Variables of every launch.")
    ready: str = Field("/health", pattern="^/", description="Route that returns 200 when the server is ready.")
    api: Literal["openai-chat", "openai-completions"] = Field("openai-completions", description="API of the load.")
    version: str = Field("", description="The release with which the profile was checked.")
    image: str | None = Field(None, description="Container image of the exports.")
    image_program: str | None = Field(
        None, description="Program that the container starts. Default: the image's entry point."
    )
    port: int = Field(8080, gt=0, lt=65536, description="Port of the exports.")
    setting: dict[Name, SettingSection] = Field(min_length=1)
    forbid: tuple[ProfileForbid, ...] = ()
    failure: tuple[FailureSection, ...] = ()
    facts: dict[Name, str] = Field(
        default_factory=dict, description="Numbers in the log: a name, and a regular expression with one group."
    )

    @model_validator(mode="after")
    def _refers_to_settings(self) -> "ServerProfile":
        for wanted in ("{port}", "{model}"):
            if wanted not in self.command:
                raise ValueError(f"`command` has no {wanted}")
        for place, names in self._references():
            for name in sorted(names - self.setting.keys()):
                raise ValueError(f"{place} reads `{name}`, which is not a setting of this profile")
        for name, pattern in self.facts.items():
            if _compiled(pattern).groups < 1:
                raise ValueError(f"the pattern of fact `{name}` has no group for its number")
        return self

    def _references(self) -> list[tuple[str, frozenset[str]]]:
        found = [(f"[[forbid]] `{each.when}`", parse(each.when).names) for each in self.forbid]
        found += [
            (f"`when` of [setting.{name}]", parse(each.when).names) for name, each in self.setting.items() if each.when
        ]
        found += [
            (f"[[failure]] `{each.match}`", frozenset((*each.grows_with, *each.shrinks_with))) for each in self.failure
        ]
        return found

    @model_validator(mode="after")
    def _conditions_can_hold(self) -> "ServerProfile":
        ranges = {name: each.candidates for name, each in self.setting.items()}
        for name, each in self.setting.items():
            if each.when and outcomes(parse(each.when), ranges) == {False}:
                raise ValueError(f"`when` of [setting.{name}] never holds: `{each.when}`")
        for expression in self.forbidden:
            if outcomes(expression, ranges) == {True}:
                raise ValueError(f"[[forbid]] `{expression.text}` always holds, so no configuration is possible")
            if expression.names <= self.defaults.keys() and expression.evaluate(self.defaults):
                raise ValueError(f"[[forbid]] `{expression.text}` forbids the defaults")
        return self

    @model_validator(mode="after")
    def _meanings_are_unique(self) -> "ServerProfile":
        if len(set(self.meanings.values())) < len(self.meanings):
            named = ", ".join(f"{name} = {meaning}" for name, meaning in self.meanings.items())
            raise ValueError(f"two settings have the same `meaning`: {named}")
        return self

    @cached_property
    def meanings(self) -> Mapping[str, str]:
        """Name of a setting to its role in the simulator's batching rule."""
        return {name: each.meaning for name, each in self.setting.items() if each.meaning is not None}

    @cached_property
    def forbidden(self) -> tuple[Expression, ...]:
        return tuple(parse(each.when) for each in self.forbid)

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        return {name: each.default for name, each in self.setting.items() if each.default is not None}


def _compiled(pattern: str) -> "re.Pattern[str]":
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"`{pattern}` is not a regular expression: {error}") from None
