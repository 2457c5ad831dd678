"""Searches on a measured grid: each strategy chooses grid points, and the grid has their results.

A search starts with the defaults and uses one repeat of each point. Its result after a number of launches succeeds if
the median of the point's other repeats is within 5 % of the best such median. If the best points of all were measured
more often, only they can be near the best: of many points with few repeats, some have a high median by chance.
Strategies: `random` without repetition, `tpe` of Optuna over the ordered levels, and `ours`, the search of `tgi-tune`
for servers without step traces. The result of the first two is the best measured point, that of `ours` the best point
of its model.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from reports.stats.estimators import wilson
from tuner.config import ServerSection
from tuner.proposers.proposal import Proposal
from tuner.proposers.surrogate import SurrogateProposer
from tuner.servers.profiled_server import ProfiledServer
from tuner.servers.server_profile import ServerProfile
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

Point = tuple[Any, ...]
STRATEGIES, LOOKS, NEAR = ("ours", "tpe", "random"), (10, 20), 0.05
RATE = "output_tokens_per_s"


@dataclass(frozen=True)
class SearchGrid:
    """Levels of each setting, a default for each, and the repeated values of every point."""

    levels: Mapping[str, Sequence[Any]]
    defaults: Mapping[str, Any]
    values: Mapping[Point, Sequence[float]]

    def seen(self, repeat: int) -> dict[Point, float]:
        """The value of each point that a search uses."""
        return {point: values[repeat] for point, values in self.values.items()}

    def judging(self, repeat: int | None) -> dict[Point, float]:
        """The medians of the repeats but this one; 0 for a point that was measured less often than the best ones."""
        most = max(map(len, self.values.values()))
        return {
            point: statistics.median(value for number, value in enumerate(values) if number != repeat)
            if len(values) == most
            else 0.0
            for point, values in self.values.items()
        }

    @property
    def num_repeats(self) -> int:
        return min(map(len, self.values.values()))

    @property
    def near_percent(self) -> float:
        """The share of the points within 5 % of the best, judged by all repeats."""
        found = self.judging(None).values()
        return 100 * sum(value >= (1 - NEAR) * max(found) for value in found) / len(found)

    @property
    def noise_percent(self) -> float:
        """The median over points of the deviation of repeats, in percent of their mean."""
        found = [statistics.stdev(each) / statistics.fmean(each) for each in self.values.values() if min(each) > 0]
        return 100 * statistics.median(found)

    @property
    def first(self) -> Point:
        return tuple(self.defaults[name] for name in self.levels)


def judge(grid: SearchGrid, seeds: int, jobs: int) -> dict[str, Any]:
    """The share of successful searches by strategy and number of launches."""
    rows = []
    with ProcessPoolExecutor(jobs) as pool:
        for strategy in STRATEGIES:
            found = list(pool.map(successes, [grid] * seeds, [strategy] * seeds, range(seeds), chunksize=5))
            for look in LOOKS:
                count = sum(each[look] for each in found)
                interval = wilson(count, seeds)
                rows.append(
                    {
                        **{"strategy": strategy, "launches": look, "searches": seeds},
                        "success_percent": round(100 * count / seeds, 1),
                        "interval": [round(100 * interval.lo, 1), round(100 * interval.hi, 1)],
                    }
                )
    return {
        "points": len(grid.values),
        "repeats": grid.num_repeats,
        "near_percent": round(grid.near_percent, 1),
        "noise_percent": round(grid.noise_percent, 2),
        "rows": rows,
    }


def render_rows(found: Mapping[str, Any]) -> str:
    """The table of a judgement."""
    head = (
        f"{found['points']} points, {found['repeats']} repeats each, {found['near_percent']:.1f} % within 5 % of the "
        f"best, deviation of repeats {found['noise_percent']:.1f} %"
    )
    return "\n".join([
        head,
        *(
            f"{row['strategy']:8s} {row['launches']:3d} launches: {row['success_percent']:5.1f} % of {row['searches']} "
            f"searches ({row['interval'][0]:.0f} to {row['interval'][1]:.0f})"
            for row in found["rows"]
        ),
    ])  # fmt: skip


def successes(grid: SearchGrid, strategy: str, seed: int) -> dict[int, bool]:
    """Whether the result after each look is within 5 % of the grid's best."""
    repeat = seed % grid.num_repeats
    judging = grid.judging(repeat)
    limit = (1 - NEAR) * max(judging.values())
    return {look: judging[point] >= limit for look, point in results(grid, grid.seen(repeat), strategy, seed)}


def results(grid: SearchGrid, seen: Mapping[Point, float], strategy: str, seed: int) -> Iterator[tuple[int, Point]]:
    """The result of one search after each look."""
    if strategy == "ours":
        yield from _ours(grid, seen, seed)
        return
    order = _tpe(grid, seen, seed) if strategy == "tpe" else _random(grid, seed)
    launched: list[Point] = []
    for point in order:
        launched.append(point)
        if len(launched) in LOOKS:
            yield len(launched), max(launched, key=lambda each: seen[each])
        if len(launched) == max(LOOKS):
            return


def _random(grid: SearchGrid, seed: int) -> list[Point]:
    others = [point for point in grid.values if point != grid.first]
    rng = np.random.default_rng(seed)
    return [grid.first, *(others[index] for index in rng.permutation(len(others)))]


def _tpe(grid: SearchGrid, seen: Mapping[Point, float], seed: int) -> Iterator[Point]:
    """The points that TPE proposes. A repeated point costs no launch and is omitted."""
    import optuna

    from tuner.study.samplers import make_sampler

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=make_sampler("tpe", seed=seed))
    known: set[Point] = set()
    study.enqueue_trial({name: _index(grid, name, grid.defaults[name]) for name in grid.levels})
    for _ in range(20 * max(LOOKS)):
        trial = study.ask()
        chosen = {
            name: trial.suggest_int(name, 0, len(values) - 1)
            if _has_order(values)
            else trial.suggest_categorical(name, list(range(len(values))))
            for name, values in grid.levels.items()
        }
        point = tuple(grid.levels[name][index] for name, index in chosen.items())
        study.tell(trial, float(np.log(max(seen[point], 1e-3))))
        if point not in known:
            known.add(point)
            yield point


def _ours(grid: SearchGrid, seen: Mapping[Point, float], seed: int) -> Iterator[tuple[int, Point]]:
    proposer = proposer_of(grid, seed)
    launched: list[TrialResult] = []
    settings: Mapping[str, Any] = dict(grid.defaults)
    while len(launched) < max(LOOKS):
        value = seen[tuple(settings[name] for name in grid.levels)]
        launched.append(
            TrialResult(len(launched), dict(settings), "measured", value=value)
            if value > 0
            else TrialResult(len(launched), dict(settings), "infeasible", phase="measure", cause="crash")
        )
        if len(launched) in LOOKS:
            best = proposer.best_first(launched)[0]
            yield len(launched), tuple(best[name] for name in grid.levels)
        proposal = proposer.propose(launched, [])
        assert isinstance(proposal, Proposal), "a grid is larger than a search"
        settings = proposal.settings


def proposer_of(grid: SearchGrid, seed: int) -> SurrogateProposer:
    """The product's proposer on the space of a grid."""
    section: dict[str, Any] = {
        name: {"type": "choice", "values": list(values), "flag": f"--{name}", "default": grid.defaults[name]}
        for name, values in grid.levels.items()
    }
    profile = ServerProfile(name="grid", command="serve {model} {port}", setting=section)
    server = ProfiledServer(ServerSection(profile="grid"), profile)
    space = SearchSpace(tuple(Parameter(name, "choice", values=tuple(each)) for name, each in grid.levels.items()))
    return SurrogateProposer(space, {}, Objective(RATE), server, seed=seed)


def _index(grid: SearchGrid, name: str, value: Any) -> int:
    return list(grid.levels[name]).index(value)


def _has_order(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
