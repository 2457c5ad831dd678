"""The capacity of a server of virtual searches, from queueing theory."""

import math

import numpy as np
import pytest
from scipy import fft, special

from loadgen.selftest.virtual_search import FIRST_TOKEN_CV, FIRST_TOKEN_S, KNOWN_SERVERS

MEAN_S, CV, STEP_S = 0.05, 1.0, 5e-5


def test_trust_F1_the_capacity_of_a_single_server_queue_is_that_of_the_formula() -> None:
    server = next(each for each in KNOWN_SERVERS if each.name == "M/G/1")

    below, above = (attainment(server.capacity + shift, server.limit_s) for shift in (-0.005, 0.005))

    assert above < server.target < below
    assert attainment(10.27, server.limit_s) == pytest.approx(0.95015, abs=5e-5)


def attainment(load: float, limit_s: float) -> float:
    """P(wait + first token <= limit) of M/G/1 (Pollaczek and Khinchine).

    The wait is a geometric sum of residual services, on a grid; the mean of rounding down and up.
    """
    moments = np.arange(round(limit_s / STEP_S) + 1) * STEP_S
    survival = 1 - lognormal_cdf(moments, MEAN_S, CV)
    residual = (survival[1:] + survival[:-1]) / 2 * STEP_S / MEAN_S
    first = lognormal_cdf(limit_s - moments, FIRST_TOKEN_S * MEAN_S, FIRST_TOKEN_CV)
    rounded = (np.append(residual, 0.0), np.insert(residual, 0, 0.0))
    return float(np.mean([(1 - load * MEAN_S) * geometric_sum(load * MEAN_S * each) @ first for each in rounded]))


def geometric_sum(mass: np.ndarray) -> np.ndarray:
    """1 / (1 - mass) as a power series, by Newton's method; [terms]."""
    rest = -mass
    rest[0] += 1
    found = np.array([1 / rest[0]])
    while len(found) < len(rest):
        terms = min(2 * len(found), len(rest))
        correction = -convolved(rest[:terms], found)[:terms]
        correction[0] += 2
        found = convolved(found, correction)[:terms]
    return found


def convolved(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    length = fft.next_fast_len(len(a) + len(b) - 1, real=True)
    return fft.irfft(fft.rfft(a, length) * fft.rfft(b, length), length)


def lognormal_cdf(values: np.ndarray, mean: float, cv: float) -> np.ndarray:
    variance = math.log1p(cv * cv)
    with np.errstate(divide="ignore"):
        return special.ndtr((np.log(values / mean) + variance / 2) / math.sqrt(variance))
