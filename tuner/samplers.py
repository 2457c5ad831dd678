"""Which of Optuna's samplers searches. None is ours."""

from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import (
    BaseSampler,
    GPSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)

from tuner.space import Parameter
from tuner.storage import stable_warnings

RANDOM_STARTS = 10
NSGA_POPULATION = 10


def make_sampler(name: str, *, seed: int) -> BaseSampler:
    """The sampler of a study."""
    with stable_warnings():
        return _make(name, seed)


def _make(name: str, seed: int) -> BaseSampler:
    match name:
        case "auto" | "tpe" | "coordinate":
            return TPESampler(n_startup_trials=RANDOM_STARTS, multivariate=True, constant_liar=True, seed=seed)
        case "gp":
            return GPSampler(n_startup_trials=RANDOM_STARTS, seed=seed, warn_independent_sampling=False)
        case "random" | "grid":
            # A grid's points are enqueued: what follows them is for whoever asks for more.
            return RandomSampler(seed=seed)
        case "qmc":
            return QMCSampler(
                seed=seed, scramble=True, warn_asynchronous_seeding=False, warn_independent_sampling=False
            )
        case "nsga2":
            return NSGAIISampler(population_size=NSGA_POPULATION, seed=seed)
    raise AssertionError(f"unchecked sampler {name}")


def distribution_of(parameter: Parameter) -> BaseDistribution:
    """A parameter as Optuna sees it: integers are floats, see `Parameter`."""
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
    """A value moved into its parameter's range."""
    distribution = distribution_of(parameter)
    if isinstance(distribution, CategoricalDistribution):
        return value if value in distribution.choices else distribution.choices[0]
    value = min(max(float(value), parameter.low), parameter.high)
    if parameter.type == "float" and parameter.step is not None:
        steps = round((value - parameter.low) / parameter.step)
        value = min(parameter.low + steps * parameter.step, parameter.high)
    return value
