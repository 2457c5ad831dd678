"""Who proposes the next launch instead of the sampler: one knob at a time, or the simulator's guide."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadgen.config import BenchConfig
from tuner.config import TuneConfig
from tuner.objective import Objective
from tuner.outcome import TrialResult
from tuner.resolve import key_of, resolved
from tuner.space import SearchSpace
from tuner.study_folder import StudyFolder

LEVELS = 5


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings to launch next; `attributes` are kept with the trial."""

    settings: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepBack:
    """The proposer has nothing more to say, and why; the sampler goes on with all trials so far.

    `is_done` where nothing more is to be gained, so that the search is over.
    """

    reason: str
    is_done: bool = False


class Proposer(Protocol):
    def propose(self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]) -> Proposal | StepBack:
        """The next launch, from what was measured and what other workers have in hand."""

    def best_first(self, results: Sequence[TrialResult]) -> list[Mapping[str, Any]] | None:
        """The measured settings, best first; None where measured values alone decide."""


@dataclass(frozen=True, slots=True)
class OneKnobAtATime:
    """Each parameter in turn over a few levels, the others at the best so far: for explaining, not for finding."""

    space: SearchSpace
    fixed: Mapping[str, Any]
    objective: Objective

    def propose(self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]) -> Proposal | StepBack:
        feasible = [each for each in results if each.is_feasible]
        best = max(feasible, key=lambda each: self.objective.merit(each.value, each.second), default=None)
        start = dict(best.settings) if best is not None else dict(self.fixed)
        known = {key_of(each.settings) for each in results} | {key_of(each) for each in running}
        for parameter in self.space.active(start):
            count = len(parameter.values) or (2 if parameter.type == "bool" else LEVELS)
            for level in range(count):
                value = parameter.at(level / (count - 1) if count > 1 else 0.5)
                settings = {**start, parameter.name: value}
                if key_of(resolved(settings)) not in known:
                    return Proposal(settings)
        return StepBack("every level of every knob was measured beside the best")

    def best_first(self, results: Sequence[TrialResult]) -> None:
        """What was measured decides."""


def proposer_of(
    config: TuneConfig,
    space: SearchSpace,
    fixed: Mapping[str, Any],
    objective: Objective,
    load: BenchConfig,
    files: StudyFolder,
) -> Proposer | None:
    """Who proposes in a study; None where its sampler does alone."""
    if config.study.sampler == "coordinate":
        return OneKnobAtATime(space, fixed, objective)
    if not config.is_guided:
        return None
    from tuner.guided import SimulatorGuide

    def deviation(metric: str) -> float | None:
        floor = files.noise()
        return floor.of(metric) if floor is not None else None

    by_rank = config.study.guide == "rank"
    return SimulatorGuide(files.path, load, space, fixed, objective, deviation, by_rank, config.study.seed)
