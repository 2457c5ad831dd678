"""The phases of a load, and a closed loop in virtual time whose server is slower the more requests run."""

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.generator.distributed.start_count import StartCount
from loadgen.generator.load_window import LoadEnd, LoadWindow
from reports.metrics.summary import summarize
from reports.run_schema import RequestRecord, Status
from reports.run_store import RunManifest, RunResult

S = 1_000_000_000


def window(**limits):
    made = LoadWindow(LoadEnd(**{"warmup_s": 0.0, "duration_s": None} | limits))
    made.start(S)
    return made


def test_trust_D1_the_window_ends_with_its_duration_and_leaves_the_requests_in_flight():
    load = window(duration_s=2.0)
    load.begin(1, 2 * S)
    load.begin(2, 3 * S)

    load.tick(3 * S)

    assert (load.reason, load.end_ns) == ("duration", 3 * S)
    assert [load.phase_at(at) for at in (S, 3 * S - 1, 3 * S)] == ["measure", "measure", "drain"]
    assert load.left == 1
    load.forget(1)
    assert load.left == 0


def test_trust_D1_the_first_requests_after_the_warm_up_are_measured_and_the_last_of_them_ends_the_window():
    load = window(warmup_s=1.0, slots=1, requests=2)
    load.begin(1, S)
    load.forget(1, slot=7)
    load.tick(2 * S)

    for key, at in ((2, 3 * S), (3, 4 * S), (4, 5 * S)):
        load.begin(key, at)

    assert (load.measure_ns, load.reason) == (2 * S, "requests")
    assert [load.phase_at(at * S) for at in (1, 3, 4, 5)] == ["warmup", "measure", "measure", "drain"]
    assert load.left == 2


def test_trust_D1_an_arrival_of_the_window_that_is_late_is_still_left():
    load = window(last_ns=S)
    load.next_due_ns = 2 * S

    load.tick(2 * S)

    assert (load.reason, load.left) == ("requests", 1)
    load.next_due_ns = 3 * S
    assert load.left == 0


def test_trust_D1_a_turn_that_starts_after_the_window_is_of_the_drain():
    load = window(duration_s=1.0)
    load.expect(1, 3 * S)

    load.tick(2 * S)

    assert (load.left, load.phase_at(3 * S)) == (0, "drain")


@given(
    starts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1_000)), max_size=60),
    from_ns=st.integers(0, 300),
    count=st.integers(1, 20),
    step=st.integers(1, 400),
)
def test_trust_D1_the_start_of_request_n_is_found_over_all_workers(starts, from_ns, count, step):
    counter = StartCount(count)
    found = None

    for begin in range(0, 1_001, step):
        for worker in range(3):
            until = begin + step - 1
            own = [at for which, at in starts if which == worker and begin <= at <= until]
            counter.add(worker, own, until)
        found = found if found is not None else counter.end_ns((0, 1, 2), from_ns)

    counted = sorted(at for _, at in starts if at >= from_ns)
    assert found == (counted[count - 1] if len(counted) >= count else None)


USERS, TOKENS, WINDOW_S = 8, 40, 60.0


def closed_loop(drain_s):
    """A load of `USERS` whose tokens take 10 ms for each running request. Returns the run as the report reads it.

    Every event of a step advances all running requests by one token.
    """
    load = window(duration_s=WINDOW_S)
    now_ns, keys = S, itertools.count()
    running: dict[int, list[int]] = {}
    queue = [(now_ns + user * 37_000_000, user) for user in range(USERS)]
    records = []
    while queue or running:
        load.tick(now_ns)
        is_over = load.end_ns is not None and (not load.left or now_ns >= load.end_ns + round(drain_s * S))
        if is_over and drain_s:
            break
        while queue and queue[0][0] <= now_ns:
            heapq.heappop(queue)
            if load.end_ns is None or drain_s:
                key = next(keys)
                load.begin(key, now_ns)
                running[key] = [now_ns]
        if not running:
            now_ns = queue[0][0] if queue else now_ns
            continue
        now_ns += len(running) * 10_000_000
        for key, moments in list(running.items()):
            moments.append(now_ns)
            if len(moments) > TOKENS + (key % 5) * 10:
                load.forget(key)
                heapq.heappush(queue, (now_ns, key))
                records.append(record_of(key, moments, load))
                del running[key]
    manifest = RunManifest("r", window_end_s=WINDOW_S, slots=USERS, stop_reason="duration")
    return RunResult(manifest, records)


def record_of(key, moments, load):
    sent, first, *rest = (at - S for at in moments)
    gaps = [later - earlier for earlier, later in itertools.pairwise((first, *rest))]
    return RequestRecord(
        "r",
        f"q{key}",
        phase=load.phase_at(moments[0]),
        status=Status.OK,
        t_intended_ns=sent,
        t_dispatch_ns=sent,
        t_sent_ns=sent,
        t_first_ns=first,
        t_last_ns=rest[-1],
        t_end_ns=rest[-1],
        gap_ns=gaps,
        events=len(gaps) + 1,
        output_tokens=len(gaps) + 1,
        first_event_tokens=1,
        tokens_source="server_stream",
    )


def test_trust_W6_the_last_requests_of_the_window_meet_the_same_load_as_the_first():
    """With eight users each token takes 80 ms; on a server that empties it takes less."""
    kept_up, emptying = (summarize(closed_loop(drain_s))["metrics"] for drain_s in (30.0, 0.0))

    assert kept_up["tpot_s"]["min"] == pytest.approx(0.080, rel=0.05)
    assert emptying["tpot_s"]["min"] < 0.060
    assert kept_up["e2e_s"]["percentiles"]["p95"]["value"] == pytest.approx(80 * 0.080, rel=0.05)
