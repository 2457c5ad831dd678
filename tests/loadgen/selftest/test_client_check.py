import pytest

from loadgen.errors import TargetError
from loadgen.generator import load_process
from loadgen.progress import SilentProgress
from loadgen.selftest import client_check, client_loads
from loadgen.selftest.client_capacity import StoredCapacity, store_capacity, stored_capacity
from reports.metrics.summary import summarize
from reports.run_schema import RequestRecord
from reports.run_store import RunManifest, RunResult
from tests.support.forked_loads import START_LOAD
from tests.support.samples.sample_run import SampleLoad, sample_run

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
    return {"inputs": f"request {number}", "due_ns": zero_ns + 151 * MS, "written_ns": written_ns}


def test_errors_are_observed_minus_reference_times():
    """TTFT: 52 seen, 50 true. Gaps: 20 and 26 seen, 20 and 20 true."""
    level = client_check.compare(1, run_of(seen(0, 152, [20, 26])), [true(0, 150, 170, 190)], 0.02)

    assert level.ttft_error_mean_ms == pytest.approx(2.0)
    assert level.ttft_error_p50_ms == pytest.approx(2.0)
    assert level.gap_error_p50_ms == pytest.approx(3.0)
    assert level.gap_mean_ratio == pytest.approx(46 / 40)
    assert (level.events, level.lost_events, level.is_accurate) == (3, 0, False)
    assert level.server_late_p99_ms == pytest.approx(-1.0)


def test_times_within_a_millisecond_and_two_percent_are_accurate():
    level = client_check.compare(1, run_of(seen(0, 151.9, [20.5, 20.5])), [true(0, 150, 170, 190)], 0.02)

    assert level.is_accurate


def test_a_load_with_a_lost_event_is_inaccurate():
    level = client_check.compare(1, run_of(seen(0, 150, [20], output_tokens=3)), [true(0, 150, 170, 190)], 0.02)

    assert (level.lost_events, level.is_accurate) == (1, False)


def test_the_cost_of_an_event_excludes_the_first_and_last_second():
    assert client_check.cpu_s_per_event(SECONDS) == pytest.approx(0.2 / 300)
    assert client_check.cpu_s_per_event(SECONDS[:2]) == pytest.approx(1.0 / 110)


def test_metrics_11_accuracy_contract_without_time_limits():
    """True on a busy machine too: no event is lost, counts are exact, no event arrives before it was written.

    A client that takes times after buffering or decoding exceeds the bound on the median; other load does not.
    """
    level = client_check.measure_level(8, 0.5, first_s=0.02, gap_s=0.005)

    assert level.requests > 0
    assert level.lost_events == 0
    assert level.event_lag_min_ms >= 0
    assert level.event_lag_p50_ms < 50


@pytest.mark.slow
def test_metrics_11_accuracy_contract_holds_at_small_scale_or_the_run_is_degraded():
    """On a machine that is busy with something else, the run is degraded, or the server itself writes late."""
    for _ in range(5):
        level = client_check.measure_level(8, 1.5)
        holds = (
            abs(level.ttft_error_mean_ms) <= 2
            and abs(level.gap_mean_ratio - 1) <= 0.01
            and abs(level.gap_error_p99_ms) <= 2
        )
        if holds:
            break

    assert level.lost_events == 0
    assert holds or (level.verdict == "degraded" and level.reasons) or level.server_late_p99_ms > 2, level


@pytest.mark.slow
def test_one_worker_is_accurate_at_400_streams_of_20_ms_per_token_or_reports_that_it_is_not():
    """On a machine that is busy with something else, the run is degraded."""
    for _ in range(3):
        level = client_check.measure_level(400, 5.0)
        if level.verdict == "valid":
            break

    assert level.lost_events == 0
    assert (level.verdict, level.is_accurate) == ("valid", True) or (level.verdict == "degraded" and level.reasons)


def level_of(streams, **values):
    """50 events/s a stream, accurate."""
    numbers = dict.fromkeys(client_check.ClientAccuracy.__slots__, 0)
    plain = {"events_per_s": 50.0 * streams, "is_accurate": True, "verdict": "valid", "reasons": ()}
    return client_check.ClientAccuracy(**numbers | plain | {"streams": streams} | values)


def test_the_capacity_is_searched_between_the_last_accurate_and_the_first_inaccurate_load(monkeypatch):
    def level(streams, _seconds, *, sends_bursts, is_starved):
        return level_of(streams, sends_bursts=sends_bursts, is_accurate=streams < 140)

    monkeypatch.setattr(client_loads, "measure_level", level)

    found = client_loads.measure_loads((16, 64, 256), 1.0, SilentProgress())

    assert [each.streams for each in found.levels if each.sends_bursts] == [16, 64, 256, 128, 181]
    assert [each.streams for each in found.levels if not each.sends_bursts] == [16, 64, 256]
    assert found.capacity == 6_400.0
    assert "accurate up to 6,400 events/s (128 streams in bursts)" in found.conclusion()
    assert "181 streams in bursts are not accurate" in found.conclusion()


def test_trust_3a_a_load_that_cannot_be_measured_ends_the_search_with_a_conclusion(monkeypatch):
    def level(streams, _seconds, *, sends_bursts, is_starved):
        if streams > 64:
            raise TargetError("/times: timed out")
        return level_of(streams, sends_bursts=sends_bursts)

    monkeypatch.setattr(client_loads, "measure_level", level)

    found = client_loads.measure_loads((64,), 1.0, SilentProgress())

    assert found.capacity == 3_200.0
    assert found.conclusion().endswith("96 streams could not be measured: /times: timed out")


def test_trust_3a_the_conclusion_names_no_load_above_an_inaccurate_one():
    starved = {"is_starved": True, "verdict": "degraded", "reasons": ("starved",), "longest_stop_ms": 38.0}

    found = client_loads.SelfTest([level_of(n, is_accurate=n != 64, **starved) for n in (16, 64, 256)])

    assert found.capacity == 800.0
    assert found.conclusion().startswith("accurate up to 800 events/s (16 streams), with half of the processor time")
    assert found.conclusion().endswith("64 streams are not accurate (degraded: starved, stopped for up to 38 ms)")


@pytest.mark.slow
def test_trust_3a_bursts_are_timed_by_arrival_not_by_read():
    """Streams with simultaneous tokens are read one after the other. The delay depends on the machine."""
    level = client_check.measure_level(16, 0.5, first_s=0.02, gap_s=0.01, sends_bursts=True)

    assert level.lost_events == 0
    assert level.read_ttft_error_mean_ms > 0
    assert abs(level.ttft_error_mean_ms) <= level.read_ttft_error_mean_ms


def test_a_capacity_is_stored_per_machine_and_marks_runs_beyond_seven_tenths(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored_capacity() is None

    path = store_capacity(StoredCapacity(5_000.0, "2026-01-01"))

    assert path == tmp_path / "tgi-bench" / "capacity.json"
    assert stored_capacity() == 5_000.0
    run = sample_run(SampleLoad(mode="closed", duration_s=10, concurrency=4))
    rate = summarize(run)["client"]["events_per_s_per_worker"]
    for factor, is_marked in ((1.5, False), (1.4, True)):
        run.client["capacity_events_per_s"] = rate * factor
        checks = {reason["check"] for reason in summarize(run)["verdict"]["reasons"]}
        assert ("capacity" in checks) == is_marked


@pytest.mark.slow
def test_trust_3a_a_starved_generator_reports_when_data_arrived(monkeypatch):
    """The generator is stopped for half of the time, in intervals of 5 ms: reads are late, arrival times are not.

    The bursts have another interval than the stops, so that some arrive during a stop. The process is found by its
    command.
    """
    monkeypatch.setattr(load_process, "start_load", START_LOAD)

    level = client_check.measure_level(16, 1.0, first_s=0.02, gap_s=0.013, sends_bursts=True, is_starved=True)

    assert (level.lost_events, level.is_starved) == (0, True)
    assert level.read_ttft_error_mean_ms > 0.3
    assert abs(level.ttft_error_mean_ms) <= level.read_ttft_error_mean_ms / 2


def test_gaps_inside_one_read_are_reported():
    level = client_check.compare(
        1, run_of(seen(0, 150, [20, 0, 20], coalesced_events=1)), [true(0, 150, 170, 170, 190)], 0.02
    )

    assert level.bounded_gaps_share == pytest.approx(1 / 3)
    assert "33.3 % of the gaps inside one read" in client_loads.render(level)
    assert level.ttft_worst_error_ms == pytest.approx(0.0)


def test_pages_2_the_result_of_a_large_load_fits_80_columns():
    values = dict.fromkeys(
        ("ttft_error_mean_ms", "ttft_error_p99_ms", "read_ttft_error_mean_ms", "read_ttft_error_p99_ms"), 123.456
    )
    level = level_of(2_000, events_per_s=123_456.0, sends_bursts=True, **values)

    lines = client_loads.render(level).splitlines()

    assert lines[0] == client_loads.headline(level)
    assert [line for line in lines if len(line) > 80] == []
