"""The load of one point: its time and its stream of requests."""

import itertools

from loadgen.capacity.point_load import Point
from loadgen.capacity.point_time import PointTime
from loadgen.config.bench_config import BenchConfig
from loadgen.workloads.arrivals import Gamma

TIME = PointTime(30, 300, 3, 2)
SERIES = BenchConfig(mode="poisson", rate=1, duration=30, seed=7, salt="s", slo=("ttft_p95_ms < 500",))


def gaps(config: BenchConfig) -> list[float]:
    """The gaps between arrivals in mean gaps."""
    times = list(itertools.islice(Gamma(config.rate or 0.0).times(config.seed), 20))
    return [round((later - earlier) / 1e9 * (config.rate or 0.0), 6) for earlier, later in itertools.pairwise(times)]


def test_trust_C6_loads_and_extensions_of_a_search_share_no_arrivals_lengths_or_texts() -> None:
    points = (Point("rate", 2.0), Point("rate", 4.0), Point("rate", 4.0, extension=1))

    loads = [point.load(SERIES, TIME, shares_stream=False) for point in points]

    assert len({tuple(gaps(load)) for load in loads}) == 3
    assert len({load.seed for load in loads}) == 3
    assert len({load.text_key for load in loads}) == 3
    assert loads[0] == points[0].load(SERIES, TIME, shares_stream=False)


def test_points_of_a_sweep_have_equal_lengths_and_new_texts() -> None:
    one, two = (Point("rate", rate).load(SERIES, TIME, shares_stream=True) for rate in (2.0, 4.0))

    assert one.seed == two.seed == SERIES.seed
    assert one.text_key != two.text_key


def test_trust_C6_a_point_goes_on_in_one_run_until_it_has_its_requests() -> None:
    load = Point("rate", 2.0, needed=73).load(SERIES, TIME, shares_stream=False)

    assert (load.least_duration, load.duration, load.independent_requests) == (30, 300, 73)
    assert load.stop_on_overload


def test_a_number_of_requests_is_not_extended() -> None:
    series = BenchConfig(requests=40, slo=("ttft_p95_ms < 500",))

    load = Point("concurrency", 4, needed=73).load(series, TIME, shares_stream=False)

    assert (load.requests, load.duration, load.independent_requests) == (40, None, None)
