"""Exports of three requests: a stream of three events, one with several tokens per event, and a failed one."""

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from reports.export import export_run
from reports.metrics.finish_run import finish_run
from reports.run_schema import RequestRecord, Status
from reports.run_store import JsonlWriter, RunManifest, write_manifest

MS = 1_000_000


def record(number: int, **changes: object) -> RequestRecord:
    begin = number * 1_000 * MS
    values = {
        "t_intended_ns": begin,
        "t_dispatch_ns": begin,
        "t_sent_ns": begin,
        "t_first_ns": begin + 20 * MS,
        "t_last_ns": begin + 50 * MS,
        "t_end_ns": begin + 51 * MS,
        "gap_ns": [10 * MS, 20 * MS],
        "events": 3,
        "input_tokens": 4,
        "output_tokens": 3,
        "first_event_tokens": 1,
    }
    return RequestRecord("run", f"r{number}", **values | changes)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    nothing = {"t_first_ns": None, "t_last_ns": None, "gap_ns": [], "events": 0, "output_tokens": None}
    records = [
        record(0),
        record(1, event_tokens=[1, 4, 2], output_tokens=7),
        record(2, status=Status.HTTP_5XX, error_type="headers/500", **nothing),
    ]
    target = {"url": "http://10.0.0.7:8080", "api": "tgi", "info": {"model_id": "m"}}
    clock = {"wall_at_start_s": 1_000.0}
    write_manifest(tmp_path, RunManifest("run", target=target, clock=clock, window_end_s=3.0))
    with JsonlWriter(tmp_path / "requests.jsonl") as writer:
        for each in records:
            writer.write(each.to_json())
    finish_run(tmp_path)
    return tmp_path


def test_metrics_15_requests_as_csv_have_the_columns_of_the_parquet_file(directory: Path) -> None:
    [path] = export_run(directory, {"csv"})

    rows = list(csv.DictReader(path.read_text().splitlines()))

    assert list(rows[0]) == pq.read_schema(directory / "requests.parquet").names
    assert [(row["request_id"], row["status"], row["gap_ns"]) for row in rows] == [
        ("r0", "ok", "10000000 20000000"),
        ("r1", "ok", "10000000 20000000"),
        ("r2", "http_5xx", ""),
    ]
    assert (rows[0]["ttft_s"], rows[2]["ttft_s"]) == ("0.02", "")


def test_metrics_15_each_event_has_a_row(directory: Path) -> None:
    [path] = export_run(directory, {"events"})

    rows = pq.read_table(path).to_pylist()

    assert pq.read_schema(path).metadata == {b"schema_version": b"1"}
    assert [(row["request_id"], row["index"], row["t_ns"] // MS, row["gap_ns"], row["tokens"]) for row in rows] == [
        ("r0", 0, 20, None, 1),
        ("r0", 1, 30, 10 * MS, 1),
        ("r0", 2, 50, 20 * MS, 1),
        ("r1", 0, 1_020, None, 1),
        ("r1", 1, 1_030, 10 * MS, 4),
        ("r1", 2, 1_050, 20 * MS, 2),
    ]


def test_metrics_14_histograms_have_the_names_and_bounds_of_the_conventions(directory: Path) -> None:
    [path] = export_run(directory, {"otel"})

    content = json.loads(path.read_text())["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    metrics = {metric["name"]: metric for metric in content}

    assert "gen_ai.server.request.duration" not in metrics
    first = metrics["gen_ai.client.operation.time_to_first_chunk"]["histogram"]["dataPoints"][0]
    assert first["explicitBounds"][:3] == [0.01, 0.02, 0.04]
    assert (first["count"], first["bucketCounts"][:3]) == ("2", ["0", "2", "0"])
    assert first["startTimeUnixNano"] == "1000000000000"
    durations = metrics["gen_ai.client.operation.duration"]["histogram"]["dataPoints"]
    errors = [{each["key"]: each["value"] for each in point["attributes"]}.get("error.type") for point in durations]
    assert errors == [{"stringValue": "http_5xx"}, None]
    tokens = metrics["gen_ai.client.token.usage"]
    assert tokens["unit"] == "{token}"
    assert [point["sum"] for point in tokens["histogram"]["dataPoints"]] == [12.0, 10.0]
    assert tokens["histogram"]["dataPoints"][0]["explicitBounds"][-1] == 67_108_864
    common = {each["key"]: each["value"] for each in first["attributes"]}
    assert common["server.port"] == {"intValue": "8080"}
    assert common["gen_ai.operation.name"] == {"stringValue": "text_completion"}
