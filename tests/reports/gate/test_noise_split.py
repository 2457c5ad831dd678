"""The components of noise from interleaved pairs, against simulated pairs with known components."""

import math

import numpy as np
import pytest

from reports.gate.noise_split import NoiseSplit, components_table, split_noise
from reports.gate.side_run import Pair, SideRun

METRIC = "tpot_p50_ms"


def drawn(launch: float, drift: float, within: float, slices: int = 4, pairs: int = 4_000) -> NoiseSplit:
    """Pairs whose machine changes once, after the first half, and whose B is 5 % worse."""
    random = np.random.default_rng(3)
    level = random.normal(0, 0.1, (pairs, 1)) + np.repeat(random.normal(0, drift, (pairs, 2)), slices // 2, axis=1)
    a, b = (level + random.normal(0, launch, (pairs, 1)) + random.normal(0, within, (pairs, slices)) for _ in range(2))
    return NoiseSplit.of(METRIC, a, b + 0.05)


@pytest.mark.parametrize(("launch", "drift", "within"), [(0.02, 0.03, 0.04), (0.0, 0.03, 0.01), (0.03, 0.0, 0.02)])
def test_trust_C5_gate_the_split_recovers_known_components(launch: float, drift: float, within: float) -> None:
    found = drawn(launch, drift, within)

    assert math.sqrt(found.launch) == pytest.approx(launch, abs=0.003)
    assert math.sqrt(found.drift) == pytest.approx(drift, abs=0.003)
    assert math.sqrt(found.within) == pytest.approx(within, rel=0.03)
    assert found.deviation_d == pytest.approx(found.interleaved(4), rel=0.03)
    assert found.separate(4) == pytest.approx(math.sqrt(2 * (launch**2 + drift**2 + within**2 / 4)), rel=0.05)


def side(value: float | None) -> SideRun:
    return SideRun("x", {METRIC: value, "error_rate": 0.0})


def pair(*values: tuple[float | None, float]) -> Pair:
    return Pair.of_slices([Pair(side(a), side(b)) for a, b in values])


def test_a_side_of_a_pair_is_the_geometric_mean_of_its_slices() -> None:
    found = pair((10.0, 20.0), (40.0, 20.0))

    assert found.a.values[METRIC] == pytest.approx(20.0)
    assert found.b.values[METRIC] == pytest.approx(20.0)
    assert pair((None, 1.0), (1.0, 1.0)).a.values[METRIC] is None


def test_the_split_needs_two_pairs_of_slices_and_every_value() -> None:
    whole, partial = pair((10.0, 11.0), (10.5, 11.0)), pair((None, 11.0), (10.5, 11.0))

    assert split_noise([whole], (METRIC,)) == ()
    assert split_noise([Pair(side(1.0), side(1.0))] * 4, (METRIC,)) == ()
    assert split_noise([whole, partial], (METRIC,)) == ()
    assert [each.name for each in split_noise([whole, whole], (METRIC, "error_rate"))] == [METRIC, "error_rate"]


def test_the_table_has_standard_deviations_in_percent() -> None:
    table = components_table([NoiseSplit(METRIC, 0.0004, 0.0009, 0.0016, 0.04, 4, 10)])

    assert table.iloc[0].to_dict() == pytest.approx(
        {
            "metric": "TPOT p50, ms",
            "launch": 2.0,
            "drift within a pair": 3.0,
            "within run": 4.0,
            "pair, separate runs": 100 * math.sqrt(2 * (0.0004 + 0.0009 + 0.0004)),
            "pair, interleaved": 4.0,
        }
    )
