"""Records, manifests and run directories survive writing, crashing and reading."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.export import FORMATS, export_run
from reports.metrics.finish_run import finish_run
from reports.renderers.write import write_figures
from reports.run_schema import RequestRecord, Status, decode_gaps, encode_gaps
from reports.run_store import (
    CLIENT_FILE,
    SCHEMA_VERSION,
    JsonlWriter,
    RunDirectoryError,
    RunManifest,
    replace_file,
    write_client,
    write_manifest,
)
from reports.saved_run import load_run
from tests.support.samples.sample_run import SampleLoad, write_sample_run

STREAMED = RequestRecord(
    run_id="r1",
    request_id="q1",
    t_intended_ns=1_000_000_000,
    t_dispatch_ns=1_001_000_000,
    t_sent_ns=1_002_000_000,
    t_headers_ns=1_010_000_000,
    t_first_ns=1_052_000_000,
    t_last_ns=1_082_000_000,
    t_end_ns=1_083_000_000,
    http_status=200,
    output_tokens=4,
    first_event_tokens=1,
    tokens_source="server_stream",
    events=4,
    gap_ns=[10_000_000, 5_000_000, 15_000_000],
)
BLOCKING = RequestRecord(
    run_id="r1", request_id="q2", t_intended_ns=0, t_sent_ns=0, t_headers_ns=90, t_end_ns=2_000_000_000, output_tokens=4
)
FAILED = RequestRecord(
    run_id="r1",
    request_id="q3",
    status=Status.CONNECT_ERROR,
    error_type="connect/ConnectionRefusedError",
    t_sent_ns=None,
)


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """The run directory of a killed worker: JSONL with an incomplete last line."""
    write_manifest(tmp_path, RunManifest("r1", mode="poisson", objectives=[{"metric": "ttft_p95_ms", "max": 60}]))
    with JsonlWriter(tmp_path / "requests.jsonl") as writer:
        for record in (STREAMED, BLOCKING, FAILED):
            writer.write(record.to_json())
    with (tmp_path / "requests.jsonl").open("ab") as file:
        file.write(b'{"run_id":"r1","requ')
    return tmp_path


@given(st.lists(st.integers(min_value=0, max_value=2**62)))
def test_gaps_of_any_size_survive_encoding(gaps: list[int]) -> None:
    assert decode_gaps(encode_gaps(gaps)) == gaps


def test_gaps_are_one_base64_string_of_int32() -> None:
    assert encode_gaps([1, 256]) == "AQAAAAABAAA="


def test_record_survives_json_without_default_fields() -> None:
    row = json.loads(json.dumps(STREAMED.to_json()))

    assert "session_id" not in row
    assert RequestRecord.from_json(row | {"column_of_tomorrow": 1}) == STREAMED


def test_crashed_run_is_readable_up_to_its_incomplete_line(crashed: Path) -> None:
    run = load_run(crashed)

    assert [record.request_id for record in run.records] == ["q1", "q2", "q3"]


def test_finished_run_has_the_same_records_and_derived_columns(crashed: Path) -> None:
    before = load_run(crashed).records

    finish_run(crashed)

    assert load_run(crashed).records == before
    assert not (crashed / "requests.jsonl").exists()
    rows = pq.read_table(crashed / "requests.parquet").to_pylist()
    assert [row["ttft_s"] for row in rows] == [0.05, None, None]
    assert [row["ttft_co_s"] for row in rows] == [0.052, None, None]
    assert [row["tpot_s"] for row in rows] == [0.01, None, None]
    assert [row["max_gap_s"] for row in rows] == [0.015, None, None]
    assert [row["e2e_s"] for row in rows] == [0.08, 2.0, None]
    assert [row["gap_ns"] for row in rows] == [[10_000_000, 5_000_000, 15_000_000], None, None]
    assert [row["slo_ok"] for row in rows] == [True, False, False]
    assert [row["itl_exact"] for row in rows] == [True, False, False]


def test_finishing_twice_changes_nothing(crashed: Path) -> None:
    finish_run(crashed)
    content = (crashed / "requests.parquet").read_bytes()

    finish_run(crashed)

    assert (crashed / "requests.parquet").read_bytes() == content


def test_run_without_requests_can_be_finished(tmp_path: Path) -> None:
    write_manifest(tmp_path, RunManifest("r1"))

    finish_run(tmp_path)

    assert load_run(tmp_path).records == []


def test_timeseries_server_metrics_and_client_are_loaded(crashed: Path) -> None:
    write_client(crashed, {"lost_workers": 0})
    with JsonlWriter(crashed / "timeseries.jsonl") as writer:
        writer.write({"t_s": 0.0, "worker": 0, "in_flight": 3, "loop_lag_max_s": 0.001})
    with JsonlWriter(crashed / "server_metrics.jsonl") as writer:
        writer.write({"t_s": 0.5, "name": "tgi_queue_size", "labels": "", "value": 2.0})

    finish_run(crashed)
    run = load_run(crashed)

    assert run.timeseries[0]["in_flight"] == 3
    assert run.server_metrics == [{"t_s": 0.5, "name": "tgi_queue_size", "labels": "", "value": 2.0}]
    assert run.client["lost_workers"] == 0


def test_missing_foreign_and_newer_directories_are_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no such directory"):
        load_run(tmp_path / "nothing")
    with pytest.raises(RunDirectoryError, match=r"not a run directory, it has no manifest\.json"):
        load_run(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1, "run_id": "x"}))
    with pytest.raises(RunDirectoryError, match="has schema 2"):
        load_run(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "someone else\'s"}')
    with pytest.raises(RunDirectoryError, match="not a run manifest"):
        load_run(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="not JSON"):
        load_run(tmp_path)


def test_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    write_manifest(tmp_path, RunManifest("r1"))
    (tmp_path / "requests.jsonl").write_text("nonsense\n{}\n")

    with pytest.raises(RunDirectoryError, match=r"requests\.jsonl:1"):
        load_run(tmp_path)


def test_foreign_rows_and_files_are_named(tmp_path: Path) -> None:
    write_manifest(tmp_path, RunManifest("r1"))
    (tmp_path / "requests.jsonl").write_text('{"run_id":"r1","request_id":"q1"}\n{"status":"ok"}\n')
    with pytest.raises(RunDirectoryError, match="request 2 is not a record"):
        load_run(tmp_path)

    (tmp_path / "requests.parquet").write_bytes(b"nonsense, but long enough to be looked at")
    with pytest.raises(RunDirectoryError, match=r"requests\.parquet: not a readable Parquet file"):
        load_run(tmp_path)


def test_failed_conversion_leaves_the_records_and_no_part(crashed: Path) -> None:
    with (crashed / "requests.jsonl").open("ab") as file:
        file.write(b"\n")

    with pytest.raises(RunDirectoryError, match=r"requests\.jsonl:4"):
        finish_run(crashed)

    assert sorted(path.name for path in crashed.iterdir()) == ["manifest.json", "requests.jsonl"]


def test_manifest_survives_json() -> None:
    manifest = RunManifest("r1", config={"rate": 2.0}, target={"url": "http://h"}, window_end_s=3.0)

    assert RunManifest.from_json(json.loads(json.dumps(manifest.to_json())) | {"of_tomorrow": 1}) == manifest


def test_importing_run_store_loads_neither_pandas_nor_pyarrow() -> None:
    code = "import sys, reports.run_store; print({'pandas', 'pyarrow', 'numpy'} & set(sys.modules))"

    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_client_file_is_named_with_its_schema(tmp_path: Path) -> None:
    write_client(tmp_path, {})

    assert json.loads((tmp_path / CLIENT_FILE).read_text())["schema_version"] == SCHEMA_VERSION


FILL = """
import resource, signal, sys
from pathlib import Path
from reports.run_store import JsonlWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with JsonlWriter(Path(sys.argv[1])) as writer:
    try:
        for number in range(100):
            writer.write({"number": number, "text": "x" * 60})
    except OSError as error:
        print(error.strerror)
"""


def test_hardening_S8_a_file_on_a_full_disk_ends_with_a_whole_line(tmp_path):
    path = tmp_path / "requests.jsonl"

    done = subprocess.run([sys.executable, "-c", FILL, str(path)], capture_output=True, text=True)

    assert done.stdout == "File too large\n", done.stderr
    lines = path.read_bytes().split(b"\n")
    assert lines[-1] == b""
    assert [json.loads(line)["number"] for line in lines[:-1]] == list(range(len(lines) - 1))
    assert len(lines) > 5


def test_hardening_S7_a_file_is_not_written_through_a_planted_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "report.html.part").symlink_to(victim)
    (tmp_path / "report.html").symlink_to(victim)

    replace_file(tmp_path / "report.html", b"new")

    assert victim.read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "new"
    assert not (tmp_path / "report.html").is_symlink()


def test_hardening_S7_a_run_of_another_person_is_read_and_exported_without_its_links(tmp_path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    write_sample_run(run, SampleLoad(duration_s=6))
    tables = [f"{name}.parquet" for name in ("requests", "timeseries", "server_metrics")]
    for name in (*tables, "requests.csv", "events.parquet", "otel.json"):
        (run / f"{name}.part").symlink_to(victim)
    for name in ("requests.csv", "events.parquet", "otel.json"):
        (run / name).symlink_to(victim)

    load_run(run)
    finish_run(run)
    written = export_run(run, FORMATS)

    assert victim.read_text() == "precious"
    assert not [path.name for path in (*written, *run.iterdir()) if path.is_symlink()]
    assert all(path.stat().st_size > 100 for path in written)


def test_hardening_S7_figures_are_not_written_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "figures").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(RunDirectoryError, match="figures is a link"):
        write_figures({}, tmp_path / "figures")
