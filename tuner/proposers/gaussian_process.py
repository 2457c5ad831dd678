"""A Gaussian process over settings that averages over sets of kernel parameters instead of fitting one set.

The kernel is a sum of one-dimensional parts, one for each setting, plus their product. Most settings multiply the
throughput, so their effects add in its logarithm; the product models interactions. Twenty launches do not determine the
length scales, so sets of kernel parameters are drawn from a prior, refined around the likely ones, and weighted by
their evidence. Rasmussen and Williams, Gaussian Processes for Machine Learning, chapters 2 and 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Sets drawn from the prior, sets added in each of the refinement rounds, and sets kept.
NUM_DRAWN, NUM_REFINED, NUM_ROUNDS, NUM_KEPT = 192, 64, 2, 16
# Prior of ln(length scale) in units of a setting's range, and its spread.
LOG_LENGTH, LOG_LENGTH_SPREAD = -0.4, 0.8
# Prior of ln(variance), and beta prior of the additive part's share, for values of unit variance.
LOG_VARIANCE, LOG_VARIANCE_SPREAD = 0.4, 0.6
ADDITIVE_SHARE = (2.0, 1.5)
# Concentration of the settings' shares of the additive part. Below 1 the prior favours few important settings.
SHARES = 0.7
LOG_NOISE_SPREAD = 0.5
MEAN_VARIANCE, JITTER = 1.0, 1e-6


@dataclass(frozen=True, slots=True)
class KernelSets:
    """Sets of kernel parameters, all as logarithms.

    length, share: [sets, settings]. variance, additive (share of the additive part), noise: [sets].
    """

    length: Array
    share: Array
    variance: Array
    additive: Array
    noise: Array

    @classmethod
    def drawn(cls, count: int, num_settings: int, noise: float, rng: np.random.Generator) -> "KernelSets":
        """Sets drawn from the prior. `noise`: the likely standard deviation of a measurement."""
        return cls(
            rng.normal(LOG_LENGTH, LOG_LENGTH_SPREAD, (count, num_settings)),
            np.log(rng.dirichlet([SHARES] * num_settings, count) + 1e-4),
            rng.normal(LOG_VARIANCE, LOG_VARIANCE_SPREAD, count),
            np.log(rng.beta(*ADDITIVE_SHARE, count)),
            rng.normal(np.log(noise), LOG_NOISE_SPREAD, count),
        )

    def near(self, chosen: npt.NDArray[np.intp], rng: np.random.Generator) -> "KernelSets":
        """One random set near each of the chosen sets."""
        count = len(chosen)
        return KernelSets(
            self.length[chosen] + rng.normal(0, 0.35, self.length[chosen].shape),
            self.share[chosen] + rng.normal(0, 0.4, self.share[chosen].shape),
            self.variance[chosen] + rng.normal(0, 0.3, count),
            np.minimum(self.additive[chosen] + rng.normal(0, 0.25, count), -1e-3),
            self.noise[chosen] + rng.normal(0, 0.25, count),
        )

    def at(self, chosen: npt.NDArray[np.intp]) -> "KernelSets":
        return KernelSets(*(part[chosen] for part in self._parts))

    def with_more(self, other: "KernelSets") -> "KernelSets":
        return KernelSets(*(np.concatenate(pair) for pair in zip(self._parts, other._parts, strict=True)))

    @property
    def _parts(self) -> tuple[Array, ...]:
        return (self.length, self.share, self.variance, self.additive, self.noise)

    def log_prior(self, noise: float) -> Array:
        """[sets]: ln of the prior density, without constants and without the nearly flat density of the shares."""
        return np.asarray(
            -0.5 * (((self.length - LOG_LENGTH) / LOG_LENGTH_SPREAD) ** 2).sum(axis=1)
            - 0.5 * ((self.variance - LOG_VARIANCE) / LOG_VARIANCE_SPREAD) ** 2
            - 0.5 * ((self.noise - np.log(noise)) / LOG_NOISE_SPREAD) ** 2
        )

    def kernel(self, distances: Array) -> Array:
        """Covariances [sets, rows, columns] without noise, of distances [settings, rows, columns]."""
        scaled = distances[None] * np.exp(-self.length)[:, :, None, None]
        parts = (1 + scaled) * np.exp(-scaled)  # Matérn 3/2, because the objective is not smooth in the settings.
        share = np.exp(self.share)
        share = share / share.sum(axis=1, keepdims=True)
        additive = np.exp(self.additive)[:, None, None]
        mixed = additive * np.einsum("sd,sdij->sij", share, parts) + (1 - additive) * parts.prod(axis=1)
        return np.asarray(np.exp(self.variance)[:, None, None] * mixed + MEAN_VARIANCE)


@dataclass(frozen=True, slots=True)
class Posterior:
    """mean, deviation: [sets, points], in the units of the values. weights: [sets], with sum 1."""

    mean: Array
    deviation: Array
    weights: Array

    @property
    def average(self) -> Array:
        """[points]: the weighted mean over the sets."""
        return np.asarray(self.weights @ self.mean)


def posterior(
    distances: Array, cross: Array, values: Sequence[float], noise: float, rng: np.random.Generator
) -> Posterior:
    """The posterior of the values at other points.

    distances: [settings, measured, measured]; cross: [settings, points, measured]; noise: likely standard deviation of
    one value, in its units.
    """
    observed = np.asarray(values, dtype=np.float64)
    centre, scale = float(observed.mean()), max(float(observed.std()), 2 * noise, 1e-6)
    scaled, scaled_noise = (observed - centre) / scale, max(noise / scale, 1e-3)
    sets = KernelSets.drawn(NUM_DRAWN, len(distances), scaled_noise, rng)
    evidence = _log_evidence(sets, distances, scaled, scaled_noise)
    for _ in range(NUM_ROUNDS):
        more = sets.near(rng.choice(len(evidence), NUM_REFINED, p=_weights(evidence)), rng)
        sets = sets.with_more(more)
        evidence = np.concatenate([evidence, _log_evidence(more, distances, scaled, scaled_noise)])
    best = np.argsort(evidence)[-NUM_KEPT:]
    sets, weights = sets.at(best), _weights(evidence[best])
    lower, solved = _solved(sets, distances, scaled)
    covariance = sets.kernel(cross)
    mean = np.einsum("spm,sm->sp", covariance, solved)
    reduced = np.linalg.solve(lower, covariance.transpose(0, 2, 1))
    variance = np.exp(sets.variance)[:, None] + MEAN_VARIANCE - (reduced**2).sum(axis=1)
    return Posterior(centre + scale * mean, scale * np.sqrt(np.maximum(variance, 1e-10)), weights)


def _solved(sets: KernelSets, distances: Array, values: Array) -> tuple[Array, Array]:
    """The Cholesky factor of each covariance, [sets, measured, measured], and its inverse times the values."""
    covariance = sets.kernel(distances)
    diagonal = np.arange(covariance.shape[1])
    covariance[:, diagonal, diagonal] += np.exp(2 * sets.noise)[:, None] + JITTER
    lower = np.linalg.cholesky(covariance)
    half = np.linalg.solve(lower, np.broadcast_to(values, (len(lower), len(values)))[..., None])
    return np.asarray(lower), np.asarray(np.linalg.solve(lower.transpose(0, 2, 1), half)[..., 0])


def _log_evidence(sets: KernelSets, distances: Array, values: Array, noise: float) -> Array:
    """[sets]: ln of likelihood times prior, without constants."""
    lower, solved = _solved(sets, distances, values)
    determinant = np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
    return np.asarray(-0.5 * solved @ values - determinant + sets.log_prior(noise))


def _weights(evidence: Array) -> Array:
    likely = np.exp(evidence - evidence.max())
    return np.asarray(likely / likely.sum())
