"""The policy of a search: its coverage on servers of known capacity, and its loads on simple ones."""

import math
import statistics

import pytest

from loadgen.capacity.point_time import PointTime
from loadgen.capacity.search_policy import CapacitySearch, SearchGoal
from loadgen.capacity.search_result import search_result
from loadgen.selftest.virtual_search import KNOWN_SERVERS, KnownServer, VirtualSearch
from reports.stats.capacity import RunEvidence

TIME = PointTime(30, 300, 3, 2)
NAMES = [server.name for server in KNOWN_SERVERS]


def searches(server: KnownServer, count: int) -> list[CapacitySearch]:
    goal = SearchGoal(*server.goal_range, server.target, 0.05, is_whole=not server.is_open)
    return [VirtualSearch(server, goal, server.time).run(seed) for seed in range(count)]


def coverage_and_width(server: KnownServer, count: int) -> tuple[float, float]:
    intervals = [search.capacity.interval for search in searches(server, count)]
    printed = [each for each in intervals if math.isfinite(each.hi - each.lo)]
    covered = sum(each.lo <= server.capacity <= each.hi for each in printed)
    return covered / len(printed), statistics.median((each.hi - each.lo) / server.capacity for each in printed)


@pytest.mark.slow
def test_trust_F1_the_interval_of_a_search_covers_the_capacity_and_is_narrow() -> None:
    coverage, width = coverage_and_width(KNOWN_SERVERS[0], 8)

    assert coverage >= 7 / 8
    assert width <= 0.12


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("server", KNOWN_SERVERS[:2], ids=NAMES[:2])
def test_trust_F1_thirty_searches_cover_the_capacity(server: KnownServer) -> None:
    """`benchmarks.client.capacity_search` has more of them, and the other servers."""
    coverage, width = coverage_and_width(server, 30)

    assert coverage >= 27 / 30
    assert width <= 0.12


def sharp(load: float, limit: float) -> RunEvidence:
    """A run on a server that keeps every objective up to a load, and is overloaded beyond."""
    return RunEvidence(load, 1.0 if load <= limit else 0.3, 150.0, 33.0, 1_000, is_overloaded=load > limit)


def searched(limit: float, **changes: object) -> CapacitySearch:
    goal = SearchGoal(**{"low": 1.0, "high": 64.0, "target": 0.95, "tolerance": 0.05} | changes)
    search = CapacitySearch(goal, TIME)
    while (load := search.next_load()) is not None:
        search = search.after(sharp(load, limit))
    return search


def test_a_sudden_limit_lies_in_the_gap_between_two_loads() -> None:
    search = searched(10.3)

    interval = search.capacity.interval
    assert interval.lo <= 10.3 < interval.hi <= 1.11 * interval.lo
    assert len(search.runs) <= 12


@pytest.mark.parametrize("limit", [2, 7, 20, 63])
def test_users_are_found_to_the_last_one(limit: int) -> None:
    search = searched(limit, tolerance=0.001, is_whole=True)

    assert (search.capacity.interval.lo, search.capacity.interval.hi) == (limit, limit + 1)
    assert (
        f"{limit} users ({limit}–{limit + 1}) keep TTFT p95 ≤ 500 ms for 95 % of requests"
        in search_result(search, "concurrency", 61, ["ttft_p95_ms ≤ 500"]).sentence
    )


def test_the_ends_of_the_range_are_results() -> None:
    above, below = search_result(searched(1_000), "rate", 61), search_result(searched(0.5), "rate", 61)

    assert (above.exit_code, above.sentence.partition(",")[0]) == (0, "Even the highest load")
    assert (below.exit_code, below.sentence.partition(",")[0]) == (1, "Even the lowest load")
    assert "in 1 min 1 s." in above.sentence


def test_trust_W7_a_search_with_too_few_requests_names_how_many_are_needed() -> None:
    search = CapacitySearch(SearchGoal(1, 64, 0.95, 0.05, is_whole=True), TIME)
    while (load := search.next_load()) is not None:
        search = search.after(RunEvidence(load, math.nan, 0.0, 303.0, 5))

    result = search_result(search, "concurrency", 900)

    assert result.exit_code == 3
    assert "Not shown at any load: too few requests; about 73 are needed at" in result.sentence


@pytest.mark.parametrize(("factor", "is_beyond"), [(1.0, False), (2.0, True)])
def test_trust_F1_a_server_is_overloaded_above_its_known_capacity_only(factor: float, is_beyond: bool) -> None:
    server = KNOWN_SERVERS[0]
    virtual = VirtualSearch(server, SearchGoal(1, 128, server.target, 0.05), PointTime(10, 10, 3, 2))

    runs = [virtual.measure(factor * server.capacity, 10**9, [1, seed]) for seed in range(20)]

    assert [run.is_overloaded for run in runs] == [is_beyond] * 20


def test_an_overloaded_load_is_a_bound_and_not_a_share() -> None:
    kept = RunEvidence(8.0, 0.99, 150.0, 33.0, 1_000)
    overloaded = RunEvidence(16.0, 0.97, 150.0, 33.0, 1_000, is_overloaded=True)
    search = CapacitySearch(SearchGoal(1, 64, 0.95, 0.05), TIME, (kept, overloaded))

    assert search.capacity.beyond == 16.0
    assert search.capacity.within == 8.0
    next_load = search.next_load()
    assert next_load is not None
    assert 8 < next_load < 16
