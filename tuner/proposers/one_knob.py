"""Coordinate search: varies one parameter at a time around the best configuration so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.proposers.proposal import Decline, Proposal
from tuner.servers.tuned_server import TunedServer
from tuner.space.configuration import key_of
from tuner.space.search_space import SearchSpace
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

LEVELS = 5


@dataclass(frozen=True, slots=True)
class OneKnobAtATime:
    """Shows the effect of each parameter. A model-based sampler finds better optima."""

    space: SearchSpace
    fixed: Mapping[str, Any]
    objective: Objective
    server: TunedServer

    def propose(self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]) -> Proposal | Decline:
        feasible = [each for each in results if each.is_feasible]
        best = max(feasible, key=lambda each: self.objective.merit(each.value, each.second), default=None)
        start = dict(best.settings) if best is not None else dict(self.fixed)
        known = {key_of(each.settings) for each in results} | {key_of(each) for each in running}
        for parameter in self.space.active(start):
            count = len(parameter.values) or (2 if parameter.type == "bool" else LEVELS)
            for level in range(count):
                value = parameter.at(level / (count - 1) if count > 1 else 0.5)
                settings = {**start, parameter.name: value}
                if key_of(self.server.resolved(settings)) not in known:
                    return Proposal(settings)
        return Decline("every level of every parameter around the best configuration is measured")

    def best_first(self, results: Sequence[TrialResult]) -> None:
        """None: finalists are ordered by measured values."""
