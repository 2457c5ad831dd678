"""The time of an eight-bit cache's keys: a known factor is found again, and predictions use it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tuner.simulator.fitting.test_linear_law import LAW, sweep
from tuner.simulator.fitting.cache_cost import LEAST, fit_factor
from tuner.simulator.fitting.cost_file import Costs, fit_costs, read_costs
from tuner.simulator.fitting.linear_law import COLUMNS, LinearLaw
from tuner.simulator.fitting.traced_steps import TracedSteps

KV = COLUMNS.index("kv")
OPTIONS = {
    "max_batch_prefill_tokens": 4096, "max_batch_total_tokens": 60_000, "waiting_served_ratio": 0.3, "schema": "v3",
}  # fmt: skip


def law_with(factor: float) -> LinearLaw:
    coefficients = list(LAW.coefficients)
    coefficients[KV] *= factor
    return LinearLaw(tuple(coefficients))


def launched(seed: int, factor: float = 1.0, noise: float = 0.02, **settings: Any) -> TracedSteps:
    facts = {"scheduler": OPTIONS, "settings": {name: {"value": value} for name, value in settings.items()}}
    return replace(sweep(np.random.default_rng(seed), noise, law_with(factor)), facts=facts)


def fitted(*launches: TracedSteps) -> Costs:
    return fit_costs(launches, with_intervals=False)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.6])
def test_a_known_factor_is_found_again(factor: float) -> None:
    costs = fitted(launched(1), launched(2), launched(3, factor, kv_cache_dtype="fp8_e4m3fn"))

    assert costs.float8_keys == pytest.approx(factor, abs=0.13)
    assert costs.of({}).law.kv_ns == pytest.approx(LAW.kv_ns, rel=0.05)
    assert costs.of({"kv_cache_dtype": "fp8_e5m2"}).law.kv_ns == pytest.approx(factor * LAW.kv_ns, abs=0.15 * LAW.kv_ns)
    # Only the keys cost another time.
    assert costs.of({"kv_cache_dtype": "fp8_e5m2"}).coefficients["rows"] == costs.of({}).coefficients["rows"]


def test_a_launch_on_a_slower_machine_has_the_same_factor() -> None:
    narrow = launched(3, 1.5, kv_cache_dtype="fp8_e4m3fn")
    slowed = replace(narrow, wall_ns=2.5 * narrow.wall_ns, total_ns=2.5 * narrow.total_ns)

    assert fitted(launched(1), launched(2), slowed).float8_keys == pytest.approx(1.5, abs=0.13)


def test_the_factor_holds_for_a_scheme_that_was_measured_with_the_eight_bit_cache_alone() -> None:
    costs = fitted(
        launched(1), launched(2, 1.5, kv_cache_dtype="fp8_e5m2"),
        launched(3, 1.5, quantize="eetq", kv_cache_dtype="fp8_e5m2"),
    )  # fmt: skip

    assert costs.of({"quantize": "eetq"}).law.kv_ns == pytest.approx(LAW.kv_ns, rel=0.15)
    narrow = costs.of({"quantize": "eetq", "kv_cache_dtype": "fp8_e5m2"})
    assert narrow.law.kv_ns == pytest.approx(1.5 * LAW.kv_ns, rel=0.15)


def test_without_a_launch_of_each_kind_the_factor_is_unknown() -> None:
    plain, narrow = launched(1), launched(2, 2.0, kv_cache_dtype="fp8_e5m2")

    assert fitted(plain).float8_keys is None
    assert fitted(plain).of({"kv_cache_dtype": "fp8_e5m2"}) == fitted(plain).of({})
    assert fitted(narrow).float8_keys is None
    assert fitted(narrow).of({}).law.kv_ns == pytest.approx(2 * LAW.kv_ns, rel=0.05)


def test_the_factor_is_not_below_that_of_the_bytes() -> None:
    assert fitted(launched(1), launched(2), launched(3, 0.0, kv_cache_dtype="fp8_e5m2")).float8_keys == LEAST


def test_steps_without_keys_give_no_factor() -> None:
    costs = fitted(launched(1))
    prefills = launched(2).chosen(launched(2).work[:, 0] > 0)

    assert fit_factor([(costs.models["none"], prefills)]) is None


def test_a_cost_file_keeps_the_factor(tmp_path: Path) -> None:
    costs = fitted(launched(1), launched(2, 1.5, kv_cache_dtype="fp8_e5m2"))
    costs.write(tmp_path / "cost.json")

    assert read_costs(tmp_path / "cost.json").float8_keys == costs.float8_keys
