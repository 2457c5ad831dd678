"""Client timings of a server with known step costs, in virtual time, with or without noise."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from reference_server.router.scheduling.step_work import StepWork
from tuner.simulator.fitting.linear_law import LinearLaw
from tuner.simulator.outside.client_run import ClientRun
from tuner.simulator.outside.designed_loads import DesignedLoad, designed_loads
from tuner.simulator.outside.fit_costs import CLIENT, law_of
from tuner.simulator.simulation import BatchingRule, Simulation

COSTS = {
    "client": 1e6,
    "prefill": 3e6,
    "prompts": 5e5,
    "tokens": 3e4,
    "squares": 8.0,
    "decode": 4e6,
    "rows": 2.5e5,
    "kv": 600.0,
}


@dataclass(frozen=True, slots=True)
class NoisyLaw:
    """A law whose steps vary by a log-normal factor."""

    law: LinearLaw
    noise: float
    rng: random.Random
    kv_ns: float | None = None

    def step_ns(self, work: StepWork) -> float:
        return self.law.step_ns(work) * self.rng.lognormvariate(0, self.noise)


def synthetic_runs(
    rule: BatchingRule,
    *,
    costs: Mapping[str, float] = COSTS,
    noise: float = 0.0,
    repeats: int = 1,
    users: int = 8,
    tokens: int = 384,
    seed: int = 0,
) -> list[ClientRun]:
    """The designed loads on a server; a repeat has its own speed, by a third of the noise."""
    rng = random.Random(seed)
    runs = []
    for _ in range(repeats):
        speed = rng.lognormvariate(0, noise / 3) if noise else 1.0
        law = law_of({name: value * speed for name, value in costs.items()})
        for load in designed_loads(users, tokens):
            run = _sent(load, rng)
            simulated_load = replace(run.load, client_ns=round(costs[CLIENT]))
            server = (rule, NoisyLaw(law, noise, random.Random(rng.random())) if noise else law)
            runs.append(run.with_times_of(Simulation(simulated_load, [server], max_concurrent_requests=10**6).run()))
    return runs


def _sent(load: DesignedLoad, rng: random.Random) -> ClientRun:
    """The requests of a load, without times."""
    count = load.requests + load.users - 1
    lengths = np.asarray([rng.choice(load.lengths) for _ in range(count)], dtype=np.float64)
    empty = np.zeros(count)
    inputs, outputs = lengths.T
    return ClientRun(load.name, load.users, empty, empty, empty, inputs, outputs, inputs, np.ones(count, dtype=bool))
