"""The Gaussian process over settings: it returns measured values, and its deviation covers unseen values."""

import math

import numpy as np

from tuner.proposers.gaussian_process import posterior


def distances(points, others):
    return np.abs(points[:, None, :] - others[None, :, :]).transpose(2, 0, 1)


def truth(points):
    return -np.abs(points[:, 0] - 0.6) + 0.3 * points[:, 1] * points[:, 0]


def found_at(points, measured, values, noise=0.01):
    return posterior(
        distances(measured, measured), distances(points, measured), values, noise, np.random.default_rng(0)
    )


def test_measured_points_have_their_values_and_little_deviation():
    measured = np.random.default_rng(1).random((16, 3))
    found = found_at(measured, measured, truth(measured))

    assert np.abs(found.average - truth(measured)).max() < 0.03
    assert math.isclose(found.weights.sum(), 1.0)


def test_the_deviation_covers_values_at_other_points():
    rng = np.random.default_rng(2)
    inside = []
    for _ in range(20):
        measured, others = rng.random((14, 3)), rng.random((20, 3))
        found = found_at(others, measured, truth(measured) + rng.normal(0, 0.01, 14))
        deviation = found.weights @ found.deviation
        inside.append(np.mean(np.abs(found.average - truth(others)) < 2 * deviation))

    assert np.mean(inside) > 0.85


def test_values_far_from_every_measurement_are_less_certain():
    measured = np.random.default_rng(3).random((10, 2)) * 0.3
    found = found_at(np.array([[0.1, 0.1], [1.0, 1.0]]), measured, truth(measured))
    deviation = found.weights @ found.deviation

    assert deviation[1] > 3 * deviation[0]


def test_equal_values_give_a_finite_posterior():
    measured = np.random.default_rng(4).random((5, 2))

    assert np.isfinite(found_at(measured, measured, [1.0] * 5).average).all()
