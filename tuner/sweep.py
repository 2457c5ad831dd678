"""Thousands of predictions: configurations in, metrics out, on as many processes as asked for."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

from tuner.costs import Costs
from tuner.forecast import Pool, Server, predict
from tuner.simulate import Load

CHUNK = 8


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Predicts configurations of one server under one load; a value, so that it travels to other processes."""

    costs: Costs
    base: Server
    pool: Pool | None
    load: Load
    names: tuple[str, ...]
    limits_ms: Mapping[str, float]

    def __call__(self, settings: Mapping[str, Any]) -> dict[str, float]:
        """Metrics of settings; nothing where no request fits. Raises ForecastError for what is not modelled."""
        server = self.base.with_settings(settings, self.pool)
        return predict(server, self.costs.of(settings), self.load, self.names, self.limits_ms)


def predict_all(
    forecaster: Callable[[Mapping[str, Any]], dict[str, float]], settings: Sequence[Mapping[str, Any]], jobs: int = 1
) -> list[dict[str, float]]:
    """The predictions, in order and the same whatever the number of processes."""
    if jobs <= 1 or len(settings) < 2 * CHUNK:
        return [forecaster(each) for each in settings]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers:
        return list(workers.map(partial(_one, forecaster), settings, chunksize=CHUNK))


def _one(forecaster: Callable[[Mapping[str, Any]], dict[str, float]], settings: Mapping[str, Any]) -> dict[str, float]:
    return forecaster(settings)
