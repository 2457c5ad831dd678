"""The search space: parameters, their conditions, and forbidden combinations."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.config import ForbidSection, ParamSection
from tuner.errors import SpaceError
from tuner.space.expression import Expression, parse
from tuner.space.nearest_name import nearest_name
from tuner.space.parameter import Parameter, Suggester


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Parameters and forbidden combinations. A condition reads only parameters before its own."""

    parameters: tuple[Parameter, ...]
    forbidden: tuple[Expression, ...] = ()

    @classmethod
    def of(
        cls, params: Mapping[str, ParamSection], forbid: Sequence[ForbidSection], known: frozenset[str]
    ) -> "SearchSpace":
        """The space of parsed sections. `known`: names of the server's settings. Raises SpaceError, ExpressionError."""
        for name in params:
            if name not in known:
                raise SpaceError(
                    f"[param] has `{name}`, which is not a setting of the server{nearest_name(name, known)}"
                )
        parameters = {name: _parameter(name, section) for name, section in params.items()}
        forbidden = tuple(parse(section.if_) for section in forbid)
        for expression in (*forbidden, *(each.when for each in parameters.values() if each.when)):
            for name in sorted(expression.names - known):
                near = nearest_name(name, known)
                raise SpaceError(f"`{expression.text}` reads `{name}`, which is not a setting of the server{near}")
        return cls(tuple(_in_order(parameters)), forbidden)

    def suggest(self, trial: Suggester, fixed: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the sampler for every parameter whose condition holds. Conditions can also read `fixed` settings."""
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.when is None or parameter.when.evaluate(_Known({**fixed, **values})):
                values[parameter.name] = parameter.suggest(trial)
        return values

    def active(self, values: Mapping[str, Any]) -> list[Parameter]:
        """The parameters whose condition these values meet."""
        return [each for each in self.parameters if each.when is None or each.when.evaluate(_Known(values))]

    def at(self, fractions: Sequence[float], fixed: Mapping[str, Any]) -> dict[str, Any]:
        """The point at the given fraction of each parameter's range. Parameters with a false condition are left out."""
        values: dict[str, Any] = {}
        for parameter, fraction in zip(self.parameters, fractions, strict=True):
            if parameter.when is None or parameter.when.evaluate(_Known({**fixed, **values})):
                values[parameter.name] = parameter.at(fraction)
        return values

    def quasi_random(self, count: int, seed: int, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Points of a Halton sequence, each with the `fixed` settings."""
        from scipy.stats import qmc

        size = len(self.parameters)
        for point in qmc.Halton(max(size, 1), seed=seed).random(count):
            yield {**fixed, **self.at([float(fraction) for fraction in point[:size]], fixed)}

    def with_values(self, name: str, values: Sequence[Any]) -> "SearchSpace":
        """The space in which the choice `name` has only `values`."""
        parameters = tuple(
            replace(each, values=tuple(value for value in each.values if value in values))
            if each.name == name
            else each
            for each in self.parameters
        )
        return SearchSpace(parameters, self.forbidden)

    def size(self) -> int | None:
        """Number of configurations; None for a continuous space."""
        count = 1
        for each in self.parameters:
            if each.type == "float" and not each.step:
                return None
            count *= each.num_values
        return count

    def grid(self, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every combination of a space of choices. Raises SpaceError if a parameter is a range."""
        lists = []
        for each in self.parameters:
            if each.type not in ("bool", "choice"):
                raise SpaceError(f"`{each.name}` is a range, but sampler `grid` needs a choice or a bool")
            lists.append((False, True) if each.type == "bool" else each.values)
        points: dict[str, dict[str, Any]] = {}
        for values in itertools.product(*lists):
            point = dict(zip((each.name for each in self.parameters), values, strict=True))
            names = {each.name for each in self.active({**fixed, **point})}
            active = {name: value for name, value in point.items() if name in names}
            points.setdefault(repr(active), active)
        return list(points.values())

    def with_models(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings, with the prepared checkpoint of a chosen value, if it has one, as `model_id`."""
        models = [
            each.models[str(settings[each.name])]
            for each in self.parameters
            if each.name in settings and str(settings[each.name]) in each.models
        ]
        return {**settings, **({"model_id": models[-1]} if models else {})}

    def why_forbidden(self, values: Mapping[str, Any]) -> str | None:
        """The text of the first forbidden combination that these values match, or None."""
        known = _Known(values)
        return next((expression.text for expression in self.forbidden if expression.evaluate(known)), None)


class _Known(dict[str, Any]):
    """Settings by name. A missing setting is None."""

    def __missing__(self, name: str) -> None:
        return None

    def __contains__(self, name: object) -> bool:
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
        values=tuple(each["value"] if isinstance(each, Mapping) else each for each in section.values),
        when=parse(section.when) if section.when else None,
        models={str(each["value"]): str(each["model_id"]) for each in section.values if isinstance(each, Mapping)},
    )


def _in_order(parameters: Mapping[str, Parameter]) -> list[Parameter]:
    """The parameters, each after those that its condition reads. Raises SpaceError for a cycle."""
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
            raise SpaceError(f"the conditions of {', '.join(f'`{each.name}`' for each in waiting)} form a cycle")
        ordered += ready
        waiting = [each for each in waiting if each not in ready]
    return ordered
