"""What may be tried: parameters, their conditions, known impossibilities, and the step from a trial to settings.

The space comes from a file, or from the `Tunable` marks on the fields of `ServerConfig`. Values are plain; the
sampler behind `Suggester` is Optuna's trial, which this module does not import.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from reference_server.config import ServerConfig
from reference_server.config_fields import tunables
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


def derived_params(fixed: Mapping[str, Any]) -> dict[str, ParamSection]:
    """The space that a file without `[param]` means: the central `Tunable` fields that `fixed` leaves open.

    Prompt budgets are narrowed to the longest prompt (a sixteenth of it may do, since prefill is chunked), choices to
    those that this server offers.
    """
    sections: dict[str, ParamSection] = {}
    for name, tunable in tunables(ServerConfig).items():
        if not tunable.central or name in fixed:
            continue
        low, high = tunable.low, tunable.high
        longest = fixed.get("max_input_tokens")
        if name == "max_batch_prefill_tokens" and isinstance(longest, int):
            low, high = max(64, longest // 16), max(4096, 4 * longest)
        sections[name] = ParamSection(
            type=tunable.kind,
            low=low,
            high=high,
            log=tunable.log,
            step=tunable.step,
            multiple_of=tunable.multiple_of,
            values=tuple(choice for choice in tunable.choices if _offered(name, choice)),
            when=tunable.when,
        )
    return sections


def _offered(name: str, choice: Any) -> bool:
    try:
        server_config({name: choice})
    except SpaceError:
        return False
    return True


def _parameter(name: str, section: ParamSection) -> Parameter:
    return Parameter(
        name,
        section.type,
        low=section.low or 0.0,
        high=section.high or 0.0,
        log=section.log,
        step=section.step,
        multiple_of=section.multiple_of or 1,
        values=section.values,
        when=parse(section.when) if section.when else None,
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
