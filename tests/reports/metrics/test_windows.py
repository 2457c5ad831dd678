"""The measurement window, and the requests in flight over time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.metrics.measured import Measured
from reports.metrics.windows import Concurrency
from reports.run_schema import RequestRecord
from reports.run_store import RunManifest, RunResult

S = 1_000_000_000


def request(start_s: float, end_s: float) -> RequestRecord:
    return RequestRecord("r", "q", t_intended_ns=int(start_s * S), t_sent_ns=int(start_s * S), t_end_ns=int(end_s * S))


def window_of(manifest: RunManifest, *records: RequestRecord):  # type: ignore[no-untyped-def]
    return Measured.of(RunResult(manifest, list(records))).window


def test_warmup_lasts_as_long_as_configured() -> None:
    window = window_of(RunManifest("r", mode="poisson", warmup_s=3.0, window_end_s=20.0), request(0, 1))

    assert (window.start_s, window.end_s, window.warmup_rule) == (3.0, 20.0, "configured")


def test_warmup_lasts_until_every_slot_has_completed_one_request() -> None:
    manifest = RunManifest("r", mode="closed", slots=2, warmup_s=1.0, window_end_s=20.0)

    window = window_of(manifest, request(0, 2), request(0.5, 4.5), request(2, 6), request(4.5, 9))

    assert (window.start_s, window.warmup_rule) == (4.5, "every slot")


def test_warmup_into_the_second_half_is_no_steady_state() -> None:
    manifest = RunManifest("r", mode="closed", slots=2, warmup_s=1.0, window_end_s=20.0)

    window = window_of(manifest, request(0, 15), request(0.5, 16))

    assert not window.is_steady
    assert (window.start_s, window.end_s) == (1.0, 20.0)


def test_run_without_a_recorded_end_ends_with_its_last_send() -> None:
    window = window_of(RunManifest("r", mode="closed"), request(0, 3), request(3, 9))

    assert window.end_s == 3.0


def test_burst_ends_with_its_last_response() -> None:
    window = window_of(RunManifest("r", mode="burst", window_end_s=0.1), request(0, 3), request(0, 9))

    assert (window.start_s, window.end_s) == (0.0, 9.0)


def test_mean_concurrency_between_edges() -> None:
    sweep = Concurrency.of(np.array([0.0, 0.5]), np.array([2.0, 1.0]))

    assert sweep.means(np.array([0.0, 1.0, 2.0, 3.0])).tolist() == [1.5, 1.0, 0.0]
    assert sweep.mean(0.0, 3.0) == pytest.approx(2.5 / 3)
    assert sweep.max(1.2, 3.0) == 1.0


PAIRS = st.lists(st.tuples(st.floats(0, 50), st.floats(0.001, 20)), min_size=1, max_size=40)


@given(PAIRS)
def test_concurrency_area_is_the_sum_of_residence_times(requests: list[tuple[float, float]]) -> None:
    starts = np.array([start for start, _ in requests])
    ends = np.array([start + length for start, length in requests])
    sweep = Concurrency.of(starts, ends)

    assert sweep.mean(0.0, 80.0) * 80 == pytest.approx(float((ends - starts).sum()), rel=1e-6)
    assert float(sweep.means(np.linspace(0, 80, 17)).mean()) == pytest.approx(sweep.mean(0.0, 80.0), rel=1e-6)
    assert 0 <= sweep.median(0.0, 80.0) <= sweep.max(0.0, 80.0) <= len(requests)


def test_requests_never_sent_are_not_in_flight_and_unended_ones_stay() -> None:
    sweep = Concurrency.of(np.array([np.nan, 1.0]), np.array([np.nan, np.nan]))

    assert sweep.mean(0.0, 2.0) == 0.5


def test_a_request_that_starts_as_another_ends_adds_no_concurrency() -> None:
    sweep = Concurrency.of(np.array([0.0, 1.0]), np.array([1.0, 2.0]))

    assert sweep.level.tolist() == [1, 0, 1, 0]
