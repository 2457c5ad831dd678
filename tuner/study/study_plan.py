"""The plan of a study before its first launch: space, number of launches, duration and commands."""

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from loadgen.config.bench_config import BenchConfig
from reports.document import format_duration, format_percent
from reports.metrics.titles import limits_text, metric_title
from tuner.config import TuneConfig
from tuner.errors import SpaceError
from tuner.servers.select import server_of
from tuner.servers.tuned_server import TunedServer, why_rejected
from tuner.space.expression import ExpressionError
from tuner.space.search_space import SearchSpace
from tuner.study.identity import params_of
from tuner.study.prepare_study import PreparedStudy, without_effect
from tuner.study.study_folder import TRIALS, StudyFolder
from tuner.study.study_search import median_seconds
from tuner.trial.objective import Objective

# Estimated time to start and stop a server if no launch is measured yet: that of the bundled server with its preset.
START_S = 8.0
DEFAULT_WARMUP_S, DEFAULT_DURATION_S = 0.0, 30.0
CHECKED_POINTS, SHOWN_REASONS = 1_000, 3
COLUMNS = 80


@dataclass(frozen=True, slots=True)
class StudyCost:
    """Number of launches by purpose, and duration of one launch in seconds."""

    noise: int
    search: int
    confirming: int
    seconds_each: float

    @property
    def launches(self) -> int:
        return self.noise + self.search + self.confirming

    @property
    def hours(self) -> float:
        return self.launches * self.seconds_each / 3600

    def __str__(self) -> str:
        return (
            f"{self.launches} launches: {self.noise} for noise, {self.search} to search, {self.confirming} to confirm; "
            f"about {self.seconds_each:.0f} s each, {format_duration(3600 * self.hours)} in all"
        )


def estimate(config: TuneConfig, load: BenchConfig, trials: int) -> StudyCost:
    """The cost of a study with `trials` launches of the search."""
    confirming = config.confirm.rounds * (1 + config.confirm.finalists) if config.confirm.rounds else 0
    duration_s = load.duration if load.duration is not None else DEFAULT_DURATION_S
    warmup_s = load.warmup if load.warmup is not None else DEFAULT_WARMUP_S
    return StudyCost(config.study.noise_runs, trials, confirming, START_S + warmup_s + duration_s)


def plan_of(prepared: PreparedStudy) -> dict[str, Any]:
    """The plan as plain values: space, parameters without effect, number of launches, duration, exact commands."""
    config, load = prepared.config, prepared.load
    params = params_of(config)
    fixed = {"model_id": config.server.model_id, **config.server.fixed}
    server = server_of(config.server)
    server.validate(fixed)
    space = SearchSpace.of(params, config.forbid, server.known)
    ineffective = without_effect(config, load)
    searched = [each for each in space.parameters if each.name not in ineffective]
    cost = estimate(config, load, config.study.num_trials(len(searched)))
    measured_s = median_seconds(StudyFolder(prepared.folder).results(TRIALS))
    if measured_s is not None:
        cost = replace(cost, seconds_each=measured_s)
    objective = Objective.of(config.objective)
    refused = refusals(space, fixed, server)
    return {
        "study": str(prepared.folder),
        "objective": list(objective.metrics),
        "limits": [str(limit) for limit in objective.limits],
        "search": search_of(config),
        "launches": cost.launches,
        "seconds_each": round(cost.seconds_each, 1),
        "hours": round(cost.hours, 2),
        "plan": str(cost),
        "baseline": list(server.launch(fixed, prepared.folder).command),
        "load": load.load_description(),
        "space": {each.name: params[each.name].model_dump(mode="json", exclude_defaults=True) for each in searched},
        "cannot_act": ineffective,
        "configurations": space.size(),
        "impossible_share": round(sum(refused.values()), 3),
        "refused": {reason: round(share, 3) for reason, share in list(refused.items())[:SHOWN_REASONS]},
        "profile": server.explained({each.name: params[each.name] for each in searched}),
    }


def search_of(config: TuneConfig) -> str:
    """A sentence on how launches are proposed."""
    if config.uses_simulator and config.study.cost is not None:
        return f"the simulator proposes launches, from the costs of {config.study.cost}"
    if config.uses_simulator:
        return "the simulator proposes launches, from the server's step times"
    if config.uses_surrogate:
        return "a surrogate model proposes launches; the simulator cannot, because the server reports no step times"
    return f"sampler `{config.study.sampler}` proposes launches"


def refusals(space: SearchSpace, fixed: Mapping[str, Any], server: TunedServer) -> dict[str, float]:
    """Rules of the server or of the space that refuse quasi-random points: rule to the fraction of refused points.

    Raises SpaceError if every point is refused, or if a condition cannot be computed.
    """
    if not space.parameters:
        return {}
    try:
        points = map(server.resolved, space.quasi_random(CHECKED_POINTS, 0, fixed))
        found = Counter(reason for point in points if (reason := why_rejected(point, space, server)) is not None)
    except ExpressionError as error:
        raise SpaceError(str(error)) from None
    if found.total() == CHECKED_POINTS:
        reasons = "; ".join(reason for reason, _ in found.most_common(SHOWN_REASONS))
        raise SpaceError(
            f"no possible configuration found: all {CHECKED_POINTS:,} random points are refused: {reasons}"
        )
    return {reason: count / CHECKED_POINTS for reason, count in found.most_common()}


def headline(plan: Mapping[str, Any]) -> str:
    """The study, its launches and its hours in one line."""
    return f"study {plan['study']}: {plan['plan']}"


def render_plan(plan: Mapping[str, Any]) -> str:
    """The plan as text of at most 80 columns, except the command of a profile."""
    objectives = (f"{metric_title(name)} ({name})" for name in plan["objective"])
    lines = [headline(plan), f"objective: {' and '.join(objectives)}"]
    lines += [f"  limit: {limits_text([limit])} ({limit.partition(' ')[0]})" for limit in plan["limits"]]
    lines.append(f"search: {plan['search']}")
    size = plan["configurations"]
    lines.append(
        f"space: {f'{size:,} configurations' if size else 'continuous'}, "
        f"{format_percent(plan['impossible_share'])} impossible"
    )
    lines += [f"  {name}: {values_text(section)}" for name, section in plan["space"].items()]
    lines += [f"  {format_percent(share)} impossible: {reason}" for reason, share in plan["refused"].items()]
    lines += [f"`{name}` has no effect and is not searched: {why}" for name, why in plan["cannot_act"].items()]
    return "\n".join([*map(_wrapped, lines), *_profile_lines(plan["profile"])])


def values_text(section: Mapping[str, Any]) -> str:
    """The values of a searched setting.

    >>> values_text({"type": "int", "low": 64.0, "high": 4096.0, "log": True, "multiple_of": 64})
    '64 to 4,096, logarithmic, multiples of 64'
    >>> values_text({"type": "bool", "when": "not sharded"}), values_text({"type": "choice", "values": ["none", "fp8"]})
    ('true or false; only when not sharded', 'none, fp8')
    """
    parts = ["true or false"] if section["type"] == "bool" else []
    if "low" in section:
        parts.append(f"{section['low']:,.10g} to {section['high']:,.10g}")
    parts += [str(each["value"] if isinstance(each, dict) else each) for each in section.get("values", ())]
    parts += ["logarithmic"] if section.get("log") else []
    parts += [f"in steps of {section['step']:g}"] if "step" in section else []
    parts += [f"multiples of {section['multiple_of']}"] if "multiple_of" in section else []
    return ", ".join(parts) + (f"; only when {section['when']}" if section.get("when") else "")


def _wrapped(line: str) -> str:
    """A line whose continuations are indented below it; paths and commands are not broken."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _profile_lines(profile: Mapping[str, Any]) -> list[str]:
    """The settings of a profile, its refused combinations, and its default command line."""
    if not profile:
        return []
    settings = (
        f"  {row['setting']} ({row['set by']}): {row['values']}; default: {row['default']}"
        + (f"; {row['here']}" if row["here"] else "")
        for row in profile["settings"]
    )
    return [
        f"profile {profile['name']}: {profile['version'] or 'no version'}",
        *map(_wrapped, settings),
        *(_wrapped(f"  refused: {condition}") for condition in profile["refused"]),
        f"default command: {profile['defaults']}",
    ]
