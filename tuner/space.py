"""What may be tried: parameters, their conditions, known impossibilities, and the step from a trial to settings.

The space comes from a file, or from the `Tunable` marks on the fields of `ServerConfig`. Values are plain; the
sampler behind `Suggester` is Optuna's trial, which this module does not import.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pydantic import ValidationError

from reference_server.config import ServerConfig
from reference_server.config_support import unsupported_settings
from tuner.config import ForbidSection, ParamSection
from tuner.errors import SpaceError
from tuner.expression import Expression, parse


class Suggester(Protocol):
    """The part of an Optuna trial that a space uses."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting and the values it may take.

    Integers are suggested as floats and rounded to `multiple_of`: samplers treat a wide integer range as so many
    separate levels, which is slow and no better.
    """

    name: str
    type: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    multiple_of: int = 1
    values: tuple[Any, ...] = ()
    when: Expression | None = None
    models: Mapping[str, str] = field(default_factory=dict)

    def at(self, share: float) -> Any:
        """The value at a share of the range, 0 to 1, as the setting takes it.

        >>> Parameter("p", "int", low=64, high=4096, log=True, multiple_of=64).at(0.5)
        512
        """
        match self.type:
            case "bool":
                return share >= 0.5
            case "choice":
                return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return self.as_setting(value)

    @property
    def num_values(self) -> int:
        """How many values it may take; 0 for a continuous range."""
        match self.type:
            case "bool":
                return 2
            case "choice":
                return len(self.values)
            case "int":
                return (self.rounded(self.high) - self.rounded(self.low)) // self.multiple_of + 1
        return round((self.high - self.low) / self.step) + 1 if self.step else 0

    def as_setting(self, value: float) -> Any:
        """A number of the range as the setting takes it."""
        if self.type == "int":
            return self.rounded(value)
        if self.step is not None:
            value = min(self.low + round((value - self.low) / self.step) * self.step, self.high)
        return round(value, 6)

    def suggest(self, trial: Suggester) -> Any:
        """A value within the range, as the setting takes it."""
        match self.type:
            case "bool":
                return trial.suggest_categorical(self.name, (False, True))
            case "choice":
                return trial.suggest_categorical(self.name, self.values)
            case "int":
                return self.rounded(trial.suggest_float(self.name, self.low, self.high, log=self.log))
            case _:
                return round(trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log), 6)

    def rounded(self, value: float) -> int:
        """The nearest multiple of `multiple_of` inside the range.

        >>> Parameter("p", "int", low=100, high=1000, multiple_of=64).rounded(1000)
        960
        """
        unit = self.multiple_of
        lowest, highest = math.ceil(self.low / unit) * unit, math.floor(self.high / unit) * unit
        return max(lowest, min(highest, round(value / unit) * unit))

    @property
    def cannot_vary(self) -> bool:
        """Whether only one value is left to choose."""
        match self.type:
            case "bool":
                return False
            case "choice":
                return len(self.values) == 1
            case "int":
                return self.rounded(self.low) == self.rounded(self.high)
            case _:
                return self.low == self.high


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Parameters, in an order in which every condition reads only earlier ones, and forbidden combinations."""

    parameters: tuple[Parameter, ...]
    forbidden: tuple[Expression, ...] = ()

    @classmethod
    def of(
        cls, params: Mapping[str, ParamSection], forbid: Sequence[ForbidSection], known: frozenset[str]
    ) -> "SearchSpace":
        """The space of a file. `known` are the settings that exist; raises SpaceError naming what is wrong."""
        for name in params:
            if name not in known:
                raise SpaceError(f"[param] names `{name}`, which is no setting of the launcher")
        parameters = {name: _parameter(name, section) for name, section in params.items()}
        forbidden = tuple(parse(section.if_) for section in forbid)
        for expression in (*forbidden, *(each.when for each in parameters.values() if each.when)):
            for name in sorted(expression.names - known):
                raise SpaceError(f"`{expression.text}` names `{name}`, which is no setting of the launcher")
        return cls(tuple(_in_order(parameters)), forbidden)

    def suggest(self, trial: Suggester, fixed: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for every parameter whose condition holds; `fixed` are settings that conditions may read as well."""
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.when is None or parameter.when.evaluate(_Known({**fixed, **values})):
                values[parameter.name] = parameter.suggest(trial)
        return values

    def active(self, values: Mapping[str, Any]) -> list[Parameter]:
        """The parameters whose condition holds among these values."""
        return [each for each in self.parameters if each.when is None or each.when.evaluate(_Known(values))]

    def at(self, shares: Sequence[float], fixed: Mapping[str, Any]) -> dict[str, Any]:
        """The point at one share of each parameter's range, conditional ones absent where their condition says so."""
        values: dict[str, Any] = {}
        for parameter, share in zip(self.parameters, shares, strict=True):
            if parameter.when is None or parameter.when.evaluate(_Known({**fixed, **values})):
                values[parameter.name] = parameter.at(share)
        return values

    def keeping(self, name: str, values: Sequence[Any]) -> "SearchSpace":
        """The space with fewer values of one choice."""
        parameters = tuple(
            replace(each, values=tuple(value for value in each.values if value in values))
            if each.name == name
            else each
            for each in self.parameters
        )
        return SearchSpace(parameters, self.forbidden)

    def size(self) -> int | None:
        """How many configurations there are; None for a continuous space."""
        count = 1
        for each in self.parameters:
            if each.type == "float" and not each.step:
                return None
            count *= each.num_values
        return count

    def raised(self, name: str, low: float) -> "SearchSpace":
        """The space with the lower end of one range no lower than `low`."""
        parameters = tuple(
            replace(each, low=max(each.low, min(low, each.high))) if each.name == name else each
            for each in self.parameters
        )
        return SearchSpace(parameters, self.forbidden)

    def grid(self, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every combination of a space of lists. Raises SpaceError where a parameter is a range."""
        lists = []
        for each in self.parameters:
            if each.type not in ("bool", "choice"):
                raise SpaceError(f"sampler `grid` goes through lists, and `{each.name}` is a range: make it a choice")
            lists.append((False, True) if each.type == "bool" else each.values)
        points: dict[str, dict[str, Any]] = {}
        for values in itertools.product(*lists):
            point = dict(zip((each.name for each in self.parameters), values, strict=True))
            names = {each.name for each in self.active({**fixed, **point})}
            active = {name: value for name, value in point.items() if name in names}
            points.setdefault(repr(active), active)
        return list(points.values())

    def with_models(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with the checkpoint that a chosen value needs."""
        models = [
            each.models[str(settings[each.name])]
            for each in self.parameters
            if each.name in settings and str(settings[each.name]) in each.models
        ]
        return {**settings, **({"model_id": models[-1]} if models else {})}

    def why_forbidden(self, values: Mapping[str, Any]) -> str | None:
        """The text of the first forbidden combination that these values are, or None."""
        known = _Known(values)
        return next((expression.text for expression in self.forbidden if expression.evaluate(known)), None)


class _Known(dict[str, Any]):
    """Settings by name, where one that was not chosen is None rather than an error."""

    def __missing__(self, name: str) -> None:
        return None

    def __contains__(self, name: object) -> bool:
        return True


def server_config(settings: Mapping[str, Any]) -> ServerConfig:
    """The launcher's configuration of plain settings; "none" and "auto" leave a setting unset.

    Raises SpaceError with the launcher's own rule when the combination cannot work.
    """
    given = {name: value for name, value in settings.items() if value not in _UNSET}
    try:
        config = ServerConfig.model_validate(given)
    except ValidationError as error:
        raise SpaceError("; ".join(_problem(problem) for problem in error.errors())) from None
    if refused := unsupported_settings(config):
        raise SpaceError("; ".join(refused))
    return config


_UNSET = ("none", "auto")


def _problem(problem: Any) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"`{problem['loc'][0]}` is {problem['input']!r}: {message}" if problem["loc"] else message


def known_settings() -> frozenset[str]:
    """The names of the launcher's settings."""
    return frozenset(ServerConfig.model_fields)


def _parameter(name: str, section: ParamSection) -> Parameter:
    return Parameter(
        name,
        section.type,
        low=section.low or 0.0,
        high=section.high or 0.0,
        log=section.log,
        step=section.step,
        multiple_of=section.multiple_of or 1,
        values=tuple(each["value"] if isinstance(each, Mapping) else each for each in section.values),
        when=parse(section.when) if section.when else None,
        models={str(each["value"]): str(each["model_id"]) for each in section.values if isinstance(each, Mapping)},
    )


def _in_order(parameters: Mapping[str, Parameter]) -> list[Parameter]:
    ordered: list[Parameter] = []
    waiting = list(parameters.values())
    while waiting:
        placed = {each.name for each in ordered}
        ready = [
            each
            for each in waiting
            if each.when is None or not (each.when.names & parameters.keys()) - placed - {each.name}
        ]
        if not ready:
            raise SpaceError(
                f"the conditions of {', '.join(f'`{each.name}`' for each in waiting)} depend on each other"
            )
        ordered += ready
        waiting = [each for each in waiting if each not in ready]
    return ordered
