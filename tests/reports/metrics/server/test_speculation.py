"""Drafts as a server counts them, from scrapes made by hand; and bursts of events, from records made by hand."""

import pytest

from reports.metrics.measured import Measured
from reports.metrics.requests.bursts import burst_size
from reports.metrics.requests.pooled_metrics import POOLED
from reports.metrics.server.speculation import speculation_summary
from reports.metrics.windows import Window
from reports.pages.sections.speculation import positions_table
from reports.run_store import RunManifest, RunResult
from tests.support.samples.stream_record import stream_record as stream


def run_of(*records):
    return RunResult(RunManifest("r", mode="poisson", window_end_s=10.0), list(records))


WINDOW = Window(10.0, 20.0, "configured", None, None, None)


def counter(name, points, labels=""):
    return [{"t_s": t_s, "name": name, "labels": labels, "value": value} for t_s, value in points.items()]


def by_position(name, grown):
    return [row for place, points in grown.items() for row in counter(name, points, f'position="{place}"')]


def test_accepted_drafts_by_position_and_tokens_per_step_of_the_bundled_server():
    rows = counter("tgi_request_skipped_tokens_sum", {10: 100.0, 20: 400.0})
    rows += counter("tgi_request_skipped_tokens_count", {10: 100.0, 20: 700.0})
    rows += by_position("tgi_draft_tokens_per_position", {1: {10: 50.0, 20: 450.0}, 2: {10: 50.0, 20: 250.0}})
    rows += by_position("tgi_accepted_tokens_per_position", {1: {10: 0.0, 20: 200.0}, 2: {10: 0.0, 20: 100.0}})

    found = speculation_summary(rows, WINDOW)

    assert found == {
        "proposed": 600.0,
        "accepted": 300.0,
        "steps": 600.0,
        "tokens_per_step": 1.5,
        "positions": [
            {"position": 1, "proposed": 400.0, "accepted": 200.0},
            {"position": 2, "proposed": 200.0, "accepted": 100.0},
        ],
    }


def test_a_position_that_appears_inside_the_window_counts_from_zero():
    rows = counter("tgi_request_skipped_tokens_count", {10: 0.0, 15: 8.0, 20: 10.0})
    rows += counter("tgi_request_skipped_tokens_sum", {10: 0.0, 15: 4.0, 20: 5.0})
    rows += by_position("tgi_draft_tokens_per_position", {1: {15: 6.0, 20: 10.0}})
    rows += by_position("tgi_accepted_tokens_per_position", {1: {15: 4.0, 20: 5.0}})

    found = speculation_summary(rows, WINDOW)

    assert (found["proposed"], found["accepted"], found["tokens_per_step"]) == (10.0, 5.0, 1.5)


def test_vllm_counts_positions_from_zero_and_drafts_instead_of_their_tokens():
    rows = counter("vllm:spec_decode_num_drafts_total", {10: 0.0, 20: 100.0}, 'model_name="m"')
    for place, accepted in enumerate((80.0, 40.0)):
        labels = f'model_name="m",position="{place}"'
        rows += counter("vllm:spec_decode_num_accepted_tokens_per_pos_total", {10: 0.0, 20: accepted}, labels)

    found = speculation_summary(rows, WINDOW)

    assert [(each["position"], each["accepted"] / each["proposed"]) for each in found["positions"]] == [
        (1, 0.8),
        (2, 0.4),
    ]
    assert found["tokens_per_step"] == pytest.approx(2.2)


def test_a_server_without_drafts_has_no_speculation():
    assert speculation_summary(counter("tgi_request_skipped_tokens_count", {10: 0.0, 20: 9.0}), WINDOW) is None
    assert speculation_summary(by_position("tgi_draft_tokens_per_position", {1: {10: 5.0, 20: 5.0}}), WINDOW) is None


def itl(run):
    return next(metric for metric in POOLED if metric.name == "itl_s").function(Measured.of(run))


def test_four_events_at_once_have_the_itl_of_one_event_of_four_tokens():
    gap_ns = [100_000_000, 50_000, 50_000, 50_000, 100_000_000, 0, 0, 0]
    bursts = run_of(stream(0.0, 1.0, 0.1, 9, gap_ns=gap_ns))
    whole = run_of(stream(0.0, 1.0, 0.1, 3, output_tokens=9, event_tokens=[1, 4, 4], gap_ns=[100_150_000, 100_000_000]))

    assert itl(bursts)[0].tolist() == pytest.approx([0.0250375] * 4 + [0.025] * 4)
    assert itl(bursts)[0].tolist() == pytest.approx(itl(whole)[0].tolist())
    assert itl(bursts)[1].tolist() == itl(whole)[1].tolist() == [8]
    assert burst_size(Measured.of(bursts).started_events).events == pytest.approx(3.0)


def test_long_stalls_make_no_burst_of_the_events_between_them():
    gap_ns = [5_000_000] * 20 + [2_000_000_000] + [5_000_000] * 20
    run = run_of(stream(0.0, 1.0, 0.1, 42, gap_ns=gap_ns))

    assert itl(run)[0].tolist() == pytest.approx([each / 1e9 for each in gap_ns])


def test_a_position_is_shown_with_its_share_and_with_that_after_an_accepted_one():
    table = positions_table(
        [{"position": 1, "proposed": 400.0, "accepted": 200.0}, {"position": 2, "proposed": 250.0, "accepted": 50.0}]
    )

    assert table["accepted, % ↑"].tolist() == [50.0, 20.0]
    assert table["after an accepted one, % ↑"].tolist()[1] == 25.0
