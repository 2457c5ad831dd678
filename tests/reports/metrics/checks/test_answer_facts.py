from typing import Any

import pytest

from reports.metrics.checks.answer_facts import answer_facts
from reports.metrics.measured import Measured
from reports.run_schema import RequestRecord, TokensSource
from reports.run_store import RunManifest, RunResult

MS = 1_000_000


def record(number: int, gaps_ms: list[float], **changes: Any) -> RequestRecord:
    start = number * 100 * MS
    gap_ns = [round(gap * MS) for gap in gaps_ms]
    first, last = start + 50 * MS, start + 50 * MS + sum(gap_ns)
    values: dict[str, Any] = {
        "t_intended_ns": start,
        "t_dispatch_ns": start,
        "t_sent_ns": start,
        "t_first_ns": first,
        "t_last_ns": last,
        "t_end_ns": last,
        "gap_ns": gap_ns,
        "events": len(gap_ns) + 1,
        "output_tokens": len(gap_ns) + 1,
        "requested_output_tokens": len(gap_ns) + 1,
        "tokens_source": TokensSource.SERVER_USAGE,
        "finish_reason": "length",
        "input_tokens": 100,
        "planned_input_tokens": 100,
    }
    return RequestRecord("r", str(number), **values | changes)


def facts(*records: RequestRecord, **manifest: Any) -> dict[str, Any]:
    run = RunResult(RunManifest("r", mode="trace", window_end_s=60.0, **manifest), list(records))
    return answer_facts(Measured.of(run))


@pytest.mark.parametrize(
    ("counted", "mismatch"),
    [
        ({"output_tokens": 4}, 0.0),
        ({"output_tokens": 6}, 2 / 6),
        ({"output_tokens": 3}, 1 / 3),
        # Several tokens in an event.
        ({"output_tokens": 8, "requested_output_tokens": 8}, 0.0),
        ({"output_tokens": 6, "requested_output_tokens": None}, 0.0),
    ],
)
def test_trust_T8_usage_below_the_events_or_above_the_limit_is_impossible(
    counted: dict[str, Any], mismatch: float
) -> None:
    assert facts(record(0, [20, 20, 20], **counted))["usage_mismatch_median"] == pytest.approx(mismatch)


def test_trust_T12_answers_without_a_finish_reason_count_where_others_have_one() -> None:
    finished, unfinished = record(0, [20]), record(1, [20], finish_reason=None)

    assert facts(finished, unfinished)["unfinished_answers"] == 1
    assert facts(unfinished)["unfinished_answers"] == 0


def test_trust_T13_size_and_interval_of_bursts() -> None:
    """Ten events together, a second later ten more; then four steps of an engine together."""
    held = facts(record(0, [0.1] * 9 + [1000] + [0.1] * 9))
    engine = facts(record(0, [0, 0, 0, 80] * 5))
    steady = facts(record(0, [20] * 19))

    assert (held["burst_events"], held["burst_interval_s"]) == (10.0, 1.0)
    assert engine["burst_events"] == pytest.approx(21 / 6)
    assert (steady["burst_events"], steady["burst_interval_s"]) == (1.0, 0.02)


@pytest.mark.parametrize(
    ("api", "counted", "excess"),
    [("openai-chat", 140, 0.0), ("openai-chat", 200, 36.0), ("tgi", 120, 16.0), ("openai-chat", 90, -10.0)],
)
def test_trust_T18_a_chat_template_may_add_tokens(api: str, counted: int, excess: float) -> None:
    found = facts(record(0, [20], input_tokens=counted), target={"api": api})

    assert found["input_tokens_excess"] == excess


def test_trust_T9_only_forced_lengths_are_compared_with_the_request() -> None:
    exact = record(0, [20, 20, 20], output_tokens=4, requested_output_tokens=4)
    short, long = (record(0, [20, 20, 20], output_tokens=n, requested_output_tokens=4) for n in (2, 5))

    assert facts(exact, exact, exact, short, length_control="forced")["other_length_share"] == 0.25
    assert facts(exact, long, length_control="forced")["other_length_share"] == 0.5
    assert facts(exact, short, length_control="capped")["other_length_share"] is None


def test_a_length_that_no_server_counted_is_not_compared() -> None:
    guessed = record(0, [20, 20, 20], output_tokens=3, requested_output_tokens=4, tokens_source=TokensSource.EVENTS)

    assert facts(guessed, length_control="forced")["other_length_share"] is None
