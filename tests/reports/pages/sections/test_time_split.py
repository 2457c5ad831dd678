"""The time breakdown, on records and server metrics made by hand."""

import pandas as pd
import pytest

from reports.metrics.summary import Analysis
from reports.pages.sections.time_breakdown import time_section
from reports.pages.sections.time_split import (
    first_token_table,
    gantt_frame,
    slowest_table,
    stack_frame,
    time_split,
    time_table,
)
from reports.plots import request_plots
from reports.plots.figure import WIDE
from reports.run_schema import RequestRecord
from reports.run_store import RunManifest, RunResult

MS = 1_000_000


def record(number: int, **changes: object) -> RequestRecord:
    """Dispatched at once, 2 ms to open a connection, 1 ms until sent, first token 50 ms later, last 100 ms later."""
    begin = number * 200 * MS
    values = {
        "t_intended_ns": begin,
        "t_dispatch_ns": begin,
        "t_sent_ns": begin + 3 * MS,
        "t_headers_ns": begin + 40 * MS,
        "t_first_ns": begin + 53 * MS,
        "t_last_ns": begin + 103 * MS,
        "t_end_ns": begin + 104 * MS,
        "connect_s": 0.002,
        "output_tokens": 2,
        "gap_ns": [50 * MS],
        "events": 2,
    }
    return RequestRecord("r", str(number), **values | changes)


def histogram(name: str, mean_s: float, labels: str = "") -> list[dict[str, object]]:
    rows = []
    for t_s, count in ((0.0, 0), (3.0, 10)):
        rows += [
            {"t_s": t_s, "name": f"{name}_sum", "labels": labels, "value": count * mean_s},
            {"t_s": t_s, "name": f"{name}_count", "labels": labels, "value": count},
        ]
    return rows


def analysis(records: list[RequestRecord], metrics: list[dict[str, object]]) -> Analysis:
    manifest = RunManifest("r", mode="closed", window_end_s=2.5, stop_reason="duration")
    return Analysis.of(RunResult(manifest, records, server_metrics=metrics))


TGI = [
    *histogram("tgi_request_validation_duration", 0.004),
    *histogram("tgi_request_queue_duration", 0.020),
    *histogram("tgi_request_inference_duration", 0.070),
    *histogram("tgi_batch_inference_duration", 0.030, 'method="prefill"'),
]


def test_parts_and_the_unexplained_rest_add_up_to_the_total() -> None:
    split = time_split(analysis([record(number) for number in range(10)], TGI))

    assert split.total_s == pytest.approx(0.103)
    assert split.client_wait_s == pytest.approx(0.001)
    assert split.network_s == pytest.approx(0.002)
    assert (split.validation_s, split.queue_s) == (pytest.approx(0.004), pytest.approx(0.020))
    assert (split.prefill_s, split.decode_s) == (pytest.approx(0.030), pytest.approx(0.040))
    assert split.residual_s == pytest.approx(0.103 - 0.001 - 0.002 - 0.004 - 0.020 - 0.070)


def test_headers_of_blocking_calls_take_precedence_over_server_metrics() -> None:
    blocking = {"t_first_ns": None, "t_last_ns": None, "gap_ns": [], "events": 0}
    stages = {"srv_validation_s": 0.001, "srv_queue_s": 0.002, "srv_inference_s": 0.090}
    split = time_split(analysis([record(number, **blocking, **stages) for number in range(10)], TGI))

    assert split.source == "response headers"
    assert split.total_s == pytest.approx(0.104)
    assert (split.queue_s, split.inference_s) == (pytest.approx(0.002), pytest.approx(0.090))


def test_without_server_times_only_client_times_are_shown() -> None:
    silent = analysis([record(number) for number in range(10)], [])

    assert time_split(silent) is None
    assert [block.title for section in time_section([silent]) for block in section.blocks] == [
        "Time breakdown of an average request",
        "The slowest requests over time",
        "The slowest requests",
    ]
    frame = stack_frame([silent])
    assert list(frame["part"]) == ["waiting", "to first token", "streaming"]
    assert frame["value_ms"].sum() == pytest.approx(103)


def test_the_stack_adds_up_and_has_inference_without_a_prefill_time() -> None:
    frame = stack_frame([analysis([record(number) for number in range(10)], TGI)])

    assert frame["value_ms"].sum() == pytest.approx(103)
    assert {"queue", "prefill", "decode", "unexplained"} < set(frame["part"])


def test_the_gantt_chart_has_the_slowest_requests_in_order_of_start() -> None:
    frame = gantt_frame(analysis([record(number) for number in range(10)], TGI), count=4)

    assert frame["row"].nunique() == 4
    assert frame.groupby("row")["start_s"].min().is_monotonic_increasing
    assert frame["name"].nunique() == 4
    assert set(frame["part"]) == {"waiting", "to first token", "streaming"}


def test_every_run_with_server_times_has_a_row_in_milliseconds() -> None:
    [row] = time_table([analysis([record(number) for number in range(10)], TGI)]).to_dict("records")

    assert row["total"] == pytest.approx(103)
    assert row["unexplained"] == pytest.approx(6)
    assert row["source"] == "server metrics"


def test_first_token_table_has_client_and_server_times() -> None:
    [row] = first_token_table([analysis([record(number) for number in range(10)], TGI)]).to_dict("records")

    assert row["TTFT (client)"] == pytest.approx(50)
    assert (row["network"], row["validation"], row["queue"], row["prefill"]) == pytest.approx((2, 4, 20, 30))
    assert row["other"] == pytest.approx(50 - 2 - 4 - 20 - 30)


def test_vllm_reports_prefill_and_decode_per_request() -> None:
    vllm = [
        *histogram("vllm:request_queue_time_seconds", 0.010),
        *histogram("vllm:request_prefill_time_seconds", 0.025),
        *histogram("vllm:request_decode_time_seconds", 0.050),
        *histogram("vllm:time_to_first_token_seconds", 0.036),
    ]
    split = time_split(analysis([record(number) for number in range(10)], vllm))
    [row] = first_token_table([analysis([record(number) for number in range(10)], vllm)]).to_dict("records")

    assert (split.queue_s, split.prefill_s, split.decode_s) == pytest.approx((0.010, 0.025, 0.050))
    assert (row["other"], row["TTFT (server)"]) == pytest.approx((50 - 2 - 10 - 25, 36))


def test_the_slowest_streams_are_split_by_their_own_moments() -> None:
    slow = {"t_last_ns": 5 * 200 * MS + 153 * MS, "t_end_ns": 5 * 200 * MS + 160 * MS}
    records = [record(number, **(slow if number == 5 else {})) for number in range(10)]
    first, second, *_ = slowest_table(analysis(records, []), count=3).to_dict("records")

    assert (first["request"], first["started, s"], first["output tokens"]) == ("5", 1.0, 2)
    assert (first["total"], first["waiting"], first["to first token"]) == pytest.approx((153, 3, 50))
    assert (first["streaming"], second["streaming"]) == pytest.approx((100, 50))


def test_the_slowest_blocking_calls_are_split_by_their_headers() -> None:
    blocking = {"t_first_ns": None, "t_last_ns": None, "gap_ns": [], "events": 0}
    stages = {"srv_validation_s": 0.001, "srv_queue_s": 0.002, "srv_inference_s": 0.090}
    rows = slowest_table(analysis([record(number, **blocking, **stages) for number in range(10)], []))

    assert list(rows["inference"]) == pytest.approx([90] * 10)
    assert list(rows["unexplained"]) == pytest.approx([104 - 3 - 1 - 2 - 90] * 10)


def test_each_bar_of_the_stack_is_beside_its_label() -> None:
    frame = pd.DataFrame(
        {
            "run": ["short", "long"],
            "part": ["queue", "queue"],
            "value_ms": [10.0, 90.0],
            "total_ms": [8.0, 90.0],
        }
    )

    [axes] = request_plots.time_stack(frame, WIDE).axes

    names = dict(zip(axes.get_yticks(), (label.get_text() for label in axes.get_yticklabels()), strict=True))
    lengths = {names[bar.get_y() + bar.get_height() / 2]: bar.get_width() for bar in axes.patches}
    assert lengths == {"short": 10.0, "long": 90.0}
    assert {text.get_text() for text in axes.texts} >= {"8.00 ms", "90.0 ms"}
