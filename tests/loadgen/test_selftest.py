import pytest

from loadgen import selftest
from loadgen.capacity import Capacity, store, stored_capacity
from loadgen.progress import Silent
from reports.records import RequestRecord
from reports.results import RunManifest, RunResult
from reports.summary import summarize
from tests.support.sample_run import sample_run

MS = 1_000_000
# The first second has the start in it, the last the end: neither is the cost of events.
SECONDS = [
    {"t_s": t_s, "cpu_share": share, "tokens_out": tokens}
    for t_s, share, tokens in ((1.0, 0.9, 10), (2.0, 0.1, 110), (4.0, 0.05, 310), (4.5, 0.8, 330))
]


def run_of(*records):
    manifest = RunManifest("r", clock={"monotonic_at_start_s": 2.0})
    return RunResult(manifest, list(records), timeseries=SECONDS)


def seen(number, first_ms, gaps_ms, **changes):
    values = {
        "prompt_id": f"prompts-{number}",
        "t_sent_ns": 100 * MS,
        "t_first_ns": round(first_ms * MS),
        "gap_ns": [round(gap * MS) for gap in gaps_ms],
        "output_tokens": len(gaps_ms) + 1,
        "events": len(gaps_ms) + 1,
    }
    return RequestRecord("r", str(number), **values | changes)


def true(number, *written_ms):
    zero_ns = 2_000 * MS
    written_ns = [zero_ns + round(at * MS) for at in written_ms]
    return {"inputs": f"request {number}", "arrived_ns": zero_ns + 101 * MS, "written_ns": written_ns}


def test_errors_are_seen_minus_true():
    """TTFT: 52 seen, 50 true. Gaps: 20 and 26 seen, 20 and 20 true."""
    level = selftest.compare(1, run_of(seen(0, 152, [20, 26])), [true(0, 150, 170, 190)], (0.05, 0.02))

    assert level.ttft_error_mean_ms == pytest.approx(2.0)
    assert level.ttft_error_p50_ms == pytest.approx(2.0)
    assert level.gap_error_p50_ms == pytest.approx(3.0)
    assert level.gap_mean_ratio == pytest.approx(46 / 40)
    assert (level.events, level.lost_events, level.is_accurate) == (3, 0, False)
    assert level.server_late_p99_ms == pytest.approx(-1.0)


def test_times_within_a_millisecond_and_two_percent_are_true():
    level = selftest.compare(1, run_of(seen(0, 151.9, [20.5, 20.5])), [true(0, 150, 170, 190)], (0.05, 0.02))

    assert level.is_accurate


def test_an_event_that_was_never_counted_makes_a_load_untrue():
    level = selftest.compare(1, run_of(seen(0, 150, [20], output_tokens=3)), [true(0, 150, 170, 190)], (0.05, 0.02))

    assert (level.lost_events, level.is_accurate) == (1, False)


def test_the_cost_of_an_event_is_that_of_the_whole_seconds_in_between():
    assert selftest.cpu_s_per_event(SECONDS) == pytest.approx(0.2 / 300)
    assert selftest.cpu_s_per_event(SECONDS[:2]) == pytest.approx(1.0 / 110)


def test_metrics_11_accuracy_contract_without_a_clock_to_miss():
    """What holds on a machine however busy: nothing lost, counts exact, no event seen before it was written.

    The bound on the median is for a client that times what it has buffered or decoded; others' load cannot reach it.
    """
    level = selftest.measure_level(8, 0.5, first_s=0.02, gap_s=0.005)

    assert level.requests > 0
    assert level.lost_events == 0
    assert level.event_lag_min_ms >= 0
    assert level.event_lag_p50_ms < 50


# They judge times, so a machine that is busy with something else can fail them: not for every change.
@pytest.mark.slow
def test_metrics_11_accuracy_contract_holds_at_small_scale():
    """The contract is about what this machine can do; a moment in which others keep it busy is tried again."""
    for _ in range(3):
        level = selftest.measure_level(8, 1.5)
        holds = (
            abs(level.ttft_error_mean_ms) <= 2
            and abs(level.gap_mean_ratio - 1) <= 0.01
            and abs(level.gap_error_p99_ms) <= 2
        )
        if holds:
            break

    assert level.lost_events == 0
    assert holds, level


@pytest.mark.slow
def test_one_worker_bears_400_streams_at_20_ms_a_token_with_a_valid_verdict():
    for _ in range(3):
        level = selftest.measure_level(400, 5.0)
        if level.verdict == "valid" and level.is_accurate:
            break

    assert (level.verdict, level.is_accurate, level.lost_events) == ("valid", True, 0)


def test_the_capacity_is_searched_between_the_last_true_load_and_the_first_that_is_not(monkeypatch):
    def level(streams, _seconds):
        numbers = dict.fromkeys(selftest.Level.__slots__, 0)
        return selftest.Level(
            **numbers | {"streams": streams, "events_per_s": 50.0 * streams, "is_accurate": streams < 140}
        )

    monkeypatch.setattr(selftest, "measure_level", level)

    levels = selftest.measure((16, 64, 256), 1.0, Silent())

    assert [each.streams for each in levels] == [16, 64, 256, 128, 181]
    assert selftest.capacity_of(levels) == 6_400.0


def test_a_capacity_is_kept_per_machine_and_marks_runs_beyond_seven_tenths(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored_capacity() is None

    path = store(Capacity(5_000.0, "2026-01-01"))

    assert path == tmp_path / "tgi-bench" / "capacity.json"
    assert stored_capacity() == 5_000.0
    run = sample_run()
    rate = summarize(run)["client"]["events_per_s_per_worker"]
    for factor, is_marked in ((1.5, False), (1.4, True)):
        run.client["capacity_events_per_s"] = rate * factor
        checks = {reason["check"] for reason in summarize(run)["verdict"]["reasons"]}
        assert ("capacity" in checks) == is_marked
