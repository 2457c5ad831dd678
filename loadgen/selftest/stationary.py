"""Stationary values of the queue models: by formula where there is one, otherwise from many simulated requests.

A wait in M/G/1 is a geometric sum of residual service times (Pollaczek and Khinchine); its distribution is summed on a
lattice by FFT. `benchmarks/reports/stationary_values.py` writes `stationary_values.json`.
"""

import json
from importlib import resources

import numpy as np
import numpy.typing as npt
from scipy import special

from loadgen.selftest.queue_models import FIRST_TOKEN_CV, FIRST_TOKEN_S, QueueModel, log_parameters

Array = npt.NDArray[np.float64]

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
LEAST_REQUESTS = 10_000_000
RUNS, DROPPED_REQUESTS, KEPT_REQUESTS = 400, 5_000, 12_500
LATTICE_STEP_S, LATTICE_POINTS = 0.0005, 2**22


def stationary_values(model: str, load: float) -> dict[str, float]:
    """`ttft mean`, `e2e p95`, … and `throughput rate` of a model at a load, from the stored file."""
    text = resources.files("loadgen.selftest").joinpath("stationary_values.json").read_text(encoding="utf-8")
    found: dict[str, float] = json.loads(text)[f"{model} {load:g}"]
    return found


def exact_values(model: QueueModel, load: float) -> dict[str, float]:
    """Values of a model with one server, or of one without waits (load 0)."""
    assert model.servers == 1 or load == 0, f"{model.name} has no formula"
    cv = model.service_cv
    edges: Array = LATTICE_STEP_S * (np.arange(LATTICE_POINTS + 1, dtype=np.float64) - 0.5)
    service, residual = _exponential(edges) if cv == 1 and model.servers == 1 else _lognormal(edges, 1.0, cv)
    first_token, _ = _lognormal(edges, FIRST_TOKEN_S, FIRST_TOKEN_CV)
    wait = (1 - load) / (1 - load * _transform(residual))
    ttft = wait * _transform(first_token)
    ttft_mean_s = load * (1 + cv**2) / (2 * (1 - load)) + FIRST_TOKEN_S
    return {
        **_described("ttft", ttft_mean_s, ttft),
        **_described("e2e", ttft_mean_s + 1, ttft * _transform(service)),
        "throughput rate": model.arrivals_per_s(load),
    }


def simulated_values(model: QueueModel, load: float, seed: int, requests: int = LEAST_REQUESTS) -> dict[str, float]:
    """Means over independent parts of `RUNS` runs each; every run drops its first `DROPPED_REQUESTS`."""
    generator = np.random.default_rng([seed, round(100 * load)])
    parts = [_simulated_part(model, load, generator) for _ in range(-(-requests // (RUNS * KEPT_REQUESTS)))]
    return {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}


def _simulated_part(model: QueueModel, load: float, generator: np.random.Generator) -> dict[str, float]:
    runs = model.simulate(generator, RUNS, DROPPED_REQUESTS + KEPT_REQUESTS, load).after(DROPPED_REQUESTS)
    values: dict[str, float] = {}
    for latency, series in (("ttft", runs.queue_s), ("e2e", runs.e2e_s)):
        values[f"{latency} mean"] = float(series.mean())
        found = np.percentile(series, PERCENTILES)
        values |= {f"{latency} p{p:g}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    length_s = float((runs.arrival_s[:, -1] - runs.arrival_s[:, 0]).mean())
    rate = (KEPT_REQUESTS - 1) / length_s if model.servers is None else model.arrivals_per_s(load)
    return values | {"throughput rate": rate}


def _described(latency: str, mean_s: float, transform: npt.NDArray[np.complex128]) -> dict[str, float]:
    below = np.cumsum(np.fft.irfft(transform, LATTICE_POINTS))
    upper_edges = LATTICE_STEP_S * (np.arange(LATTICE_POINTS) + 0.5)
    found = np.interp(np.array(PERCENTILES) / 100, below, upper_edges)
    percentiles = {f"{latency} p{p:g}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {f"{latency} mean": mean_s, **percentiles}


def _transform(cdf: Array) -> npt.NDArray[np.complex128]:
    """The transform of a distribution's weights on the lattice, from its values at the lattice's edges."""
    return np.fft.rfft(np.diff(cdf))


def _exponential(edges: Array) -> tuple[Array, Array]:
    """The distribution of an exponential time of mean 1, and of its residual time."""
    cdf = -np.expm1(-np.maximum(edges, 0.0))
    return cdf, cdf


def _lognormal(edges: Array, mean: float, cv: float) -> tuple[Array, Array]:
    """The distribution of a lognormal time, and of its residual time."""
    location, spread = log_parameters(mean, cv)
    logs = np.log(np.maximum(edges, 1e-300))
    cdf = special.ndtr((logs - location) / spread)
    # The integral of the survival function up to x is x * (1 - F(x)) plus the part of the mean below x.
    residual = np.maximum(edges, 0.0) * (1 - cdf) / mean + special.ndtr((logs - location) / spread - spread)
    return cdf, residual
