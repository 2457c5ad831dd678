"""Optuna's samplers by name, and parameters as Optuna's distributions."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseSampler,
    GPSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)

from tuner.space.parameter import Parameter

RANDOM_STARTS = 10
NSGA_POPULATION = 10


@contextlib.contextmanager
def without_experimental_warnings() -> Iterator[None]:
    """Suppress Optuna's ExperimentalWarning. Interfaces cannot change, because Optuna's release is pinned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def make_sampler(name: str, *, seed: int) -> BaseSampler:
    """The Optuna sampler with a name of `SamplerName`."""
    with without_experimental_warnings():
        return _make(name, seed)


def _make(name: str, seed: int) -> BaseSampler:
    match name:
        case "auto" | "tpe" | "coordinate":
            return TPESampler(n_startup_trials=RANDOM_STARTS, multivariate=True, constant_liar=True, seed=seed)
        case "gp":
            return GPSampler(n_startup_trials=RANDOM_STARTS, seed=seed, warn_independent_sampling=False)
        case "random" | "grid":
            # The points of a grid are enqueued. Trials beyond them are random.
            return RandomSampler(seed=seed)
        case "qmc":
            return QMCSampler(
                seed=seed, scramble=True, warn_asynchronous_seeding=False, warn_independent_sampling=False
            )
        case "nsga2":
            return NSGAIISampler(population_size=NSGA_POPULATION, seed=seed)
    raise AssertionError(f"unchecked sampler {name}")


def distribution_of(parameter: Parameter) -> BaseDistribution:
    """The distribution of a parameter. Integers are floats, see `Parameter`."""
    match parameter.type:
        case "bool":
            return CategoricalDistribution((False, True))
        case "choice":
            return CategoricalDistribution(parameter.values)
        case "float":
            return FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step)
        case _:
            return FloatDistribution(parameter.low, parameter.high, log=parameter.log)


def inside(parameter: Parameter, value: Any) -> Any:
    """The nearest value in the parameter's range; the first choice for an unknown choice."""
    distribution = distribution_of(parameter)
    if isinstance(distribution, CategoricalDistribution):
        return value if value in distribution.choices else distribution.choices[0]
    value = min(max(float(value), parameter.low), parameter.high)
    if parameter.type == "float" and parameter.step is not None:
        steps = round((value - parameter.low) / parameter.step)
        value = min(parameter.low + steps * parameter.step, parameter.high)
    return value
