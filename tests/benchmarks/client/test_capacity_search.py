import math
from concurrent.futures import ThreadPoolExecutor

from benchmarks.client.capacity_search import Found, SearchStore


def finished(seed: int) -> Found:
    return Found(value=10.0 + seed, lo=9.0, hi=math.nan if seed == 2 else 11.0, runs=3, time_s=60.0)


def test_a_measurement_continues_from_the_searches_that_are_stored(tmp_path):
    store, asked = SearchStore(tmp_path / "searches.jsonl"), []

    def search(seed: int) -> Found:
        asked.append(seed)
        return finished(seed)

    with ThreadPoolExecutor(1) as pool:
        store.completed("search", search, range(3), pool, math.inf)
        with store.path.open("a") as file:
            file.write('\n{"key": "search", "seed": 3, "fou')
        found = store.completed("search", search, range(3), pool, math.inf)
        other = store.completed("bisection", search, range(1), pool, math.inf)
        again = store.completed("bisection", search, range(1), pool, math.inf)

    assert asked == [0, 1, 2, 0]
    assert [each.value for each in found] == [10.0, 11.0, 12.0]
    assert math.isnan(found[2].hi)
    assert other == again == [finished(0)]


def test_no_search_starts_after_the_time(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        assert SearchStore(tmp_path / "searches.jsonl").completed("search", finished, range(3), pool, -math.inf) == []
        assert SearchStore(None).completed("search", finished, range(3), pool, math.inf)[1] == finished(1)
