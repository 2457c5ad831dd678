"""How strongly the values of successive requests hang together, and what that asks of a block bootstrap.

Requests that overlap share the server's state, and those of a burst share its queue. Blocks must be longer than such a
connection lasts, and blocks of any length see a little too little variance; both are read off the series itself.
"""

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# A cut below this share of the series leaves so few blocks that their spread says nothing.
LARGEST_SHARE = 0.1


def autocovariance(series: Array) -> Array:
    """Of every lag, by one Fourier transform."""
    count = len(series)
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(series - series.mean(), size)
    products: Array = np.fft.irfft(spectrum * spectrum.conj(), size)[:count]
    return products / count


def chosen_block(series: Array, least: int) -> int:
    """Units per block: `least` or what the autocorrelation asks for, at most a tenth of the series.

    The length with the smallest error of the variance (Politis and White, 2004; Patton, Politis and White, 2009).
    """
    count = len(series)
    most = max(least, math.floor(LARGEST_SHARE * count))
    covariance = autocovariance(series)
    if count < 30 or covariance[0] <= 0:
        return least
    variance, slope = _flat_top(covariance, _last_correlated_lag(covariance))
    if variance <= 0:
        return most
    wanted = math.ceil((1.5 * (slope / variance) ** 2 * count) ** (1 / 3))
    return int(min(max(least, wanted), most))


def widening(series: Array, block: int) -> float:
    """The factor by which an interval from blocks of this length is too narrow for the mean of the series, at least 1.

    Two parts: the variance that blocks cannot see (Bartlett weights against a flat-top estimate without that bias), and
    that few blocks know the variance poorly (Kiefer and Vogelsang, 2005, critical values of Bartlett's kernel).
    """
    count = len(series)
    covariance = autocovariance(series)
    share = min(block / count, 1.0)
    few = (1.96 + 2.9694 * share + 0.416 * share**2 - 0.5324 * share**3) / 1.96
    if count < 30 or covariance[0] <= 0:
        return few
    lags = np.arange(1, min(block, count))
    seen = float(covariance[0] + 2 * ((1 - lags / block) @ covariance[lags]))
    variance, _ = _flat_top(covariance, _last_correlated_lag(covariance))
    unseen = math.sqrt(max(1.0, variance / seen)) if seen > 0 else 1.0
    return few * unseen


def _last_correlated_lag(covariance: Array) -> int:
    """The lag after which several in a row are no more than noise."""
    count = len(covariance)
    in_a_row = max(5, math.ceil(math.sqrt(math.log10(count))))
    noise = 2 * math.sqrt(math.log10(count) / count) * covariance[0]
    most = min(2 * math.ceil(math.sqrt(count)) + in_a_row, count - 1)
    is_noise = np.abs(covariance[1 : most + 1]) < noise
    runs = np.convolve(is_noise, np.ones(in_a_row), "valid") == in_a_row
    found = np.flatnonzero(runs)
    return int(found[0]) if len(found) else most


def _flat_top(covariance: Array, lag: int) -> tuple[float, float]:
    """The long-run variance with weights 1 up to `lag` and falling to 0 at twice that, and the sum of |k| * cov(k)."""
    lag = max(lag, 1)
    lags = np.arange(1, min(2 * lag, len(covariance) - 1) + 1)
    weights = np.minimum(1.0, 2 - lags / lag)
    weighted = weights * covariance[lags]
    return float(covariance[0] + 2 * weighted.sum()), float(2 * (lags * weighted).sum())
