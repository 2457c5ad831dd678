import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from loadgen import run_directory
from loadgen.commands.present import show_runs
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import MeasurementError, TargetError, UsageError
from loadgen.run_directory import new_run_id
from loadgen.runner import measure
from loadgen.target.launched.launched_target import LaunchedTarget
from loadgen.target.target import Target
from reports.metrics.summary import Analysis, metric_value
from reports.pages.sections.latency_tables import summary_table
from reports.saved_run import load_run
from tests.support.measured_requests import measured
from tests.support.servers.stream_server import Script, ServerState, stream_server


@pytest.fixture
def state():
    return ServerState(script=lambda body: Script(first_s=0.01, gap_s=0.005))


def generations(state):
    return [request["body"] for request in state.requests if request["path"] != "/tokenize"]


@pytest.mark.slow
@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_server_that_closes_after_each_stream_gets_a_new_connection_each_time(hangs_up, tmp_path):
    state = ServerState(lambda _: Script(hangs_up=hangs_up), has_info=False, owner="llamacpp")
    with stream_server(state) as (url, _):
        result = measure(BenchConfig(concurrency=3, requests=20, output_tokens="3"), Target(url), tmp_path / "r")

    assert {record.status for record in measured(result)} == {"ok"}
    assert any(record.conn_reused for record in result.records) is not hangs_up
    assert result.manifest.target["reuses_connections"] is not hangs_up


@pytest.mark.slow
def test_a_server_without_metrics_is_named_with_its_flag(tmp_path):
    with stream_server(ServerState(has_info=False, owner="llamacpp", has_metrics=False)) as (url, _):
        result = measure(BenchConfig(concurrency=1, requests=2, output_tokens="3"), Target(url), tmp_path / "r")

    assert result.manifest.target["server_metrics"] == "none; start llama.cpp with --metrics"


def test_a_closed_loop_never_exceeds_its_users_and_accounts_for_every_request(url, state, tmp_path):
    config = BenchConfig(concurrency=3, requests=20, input_tokens="16", output_tokens="4")

    result = measure(config, Target(url), tmp_path / "r")

    assert [record.status for record in measured(result)] == ["ok"] * 20
    assert len(generations(state)) == len(result.records)
    assert {record.input_tokens for record in measured(result)} == {16}
    assert {record.output_tokens for record in measured(result)} == {4}
    moments = sorted(
        [(record.t_sent_ns, 1) for record in result.records] + [(record.t_end_ns, -1) for record in result.records]
    )
    in_flight = [sum(change for _, change in moments[: end + 1]) for end in range(len(moments))]
    assert max(in_flight) == 3
    assert result.manifest.stop_reason == "requests"
    assert result.manifest.length_control == "forced"
    assert result.client["server_requests"] == len(result.records)
    assert isinstance(result.client["workers"][0]["runs_before_others"], bool)
    assert result.manifest.target["info"]["model_id"] == "scripted"
    assert result.manifest.target["config"] == {"max_waiting_tokens": 20}


@pytest.mark.slow
def test_prompts_are_distinct_and_equal_for_an_equal_seed_and_salt(url, state, tmp_path):
    config = BenchConfig(mode="burst", requests=12, input_tokens="24", output_tokens="2", seed=5, salt="mine")

    results = [measure(config, Target(url), tmp_path / name) for name in ("a", "b")]

    texts = [body["inputs"] for body in generations(state)]
    assert len(set(texts)) == 12
    assert sorted(texts[:12]) == sorted(texts[12:])
    assert results[0].manifest.workload_hash == results[1].manifest.workload_hash
    assert results[0].manifest.text_hash == results[1].manifest.text_hash
    assert results[0].manifest.schedule_hash == results[1].manifest.schedule_hash


@pytest.mark.parametrize(
    "workload",
    [
        {"input_tokens": "uniform:16,32"},
        pytest.param({"workload": "shared_prefix", "prefix_tokens": 16, "input_tokens": "8"}, marks=pytest.mark.slow),
        pytest.param({"workload": "prompts"}, marks=pytest.mark.slow),
    ],
    ids=lambda workload: workload.get("workload", "synthetic"),
)
def test_trust_W1_a_second_run_on_one_server_sends_no_prompt_that_it_knows(url, state, tmp_path, workload):
    if workload.get("workload") == "prompts":
        (tmp_path / "prompts.txt").write_text("how are you\nwhere is it\n")
        workload = workload | {"prompts_file": str(tmp_path / "prompts.txt")}
    config = BenchConfig(mode="burst", requests=12, output_tokens="2", seed=5, **workload)

    results = [measure(config, Target(url), tmp_path / name) for name in ("a", "b")]

    texts = [body["inputs"] for body in generations(state)]
    openings = [{text[:12] for text in part} for part in (texts[:12], texts[12:])]
    assert not openings[0] & openings[1] or workload.get("workload") is None
    assert not set(texts[:12]) & set(texts[12:])
    first, second = (result.manifest for result in results)
    assert first.workload_hash == second.workload_hash
    assert first.text_hash != second.text_hash
    assert first.salt != second.salt
    lengths = [sorted(record.input_tokens or 0 for record in result.records) for result in results]
    assert lengths[0] == lengths[1]


@pytest.mark.slow
def test_trust_W1_a_file_is_sent_unchanged_without_a_salt(url, state, tmp_path):
    (tmp_path / "prompts.txt").write_text("how are you\n")
    config = BenchConfig(
        requests=1, concurrency=1, workload="prompts", prompts_file=str(tmp_path / "prompts.txt"), salt="off"
    )

    measure(config, Target(url), tmp_path / "r")

    assert generations(state)[0]["inputs"] == "how are you"


def test_an_open_loop_starts_requests_independent_of_those_in_flight(url, state, tmp_path):
    """Answers take far longer than the spacing of arrivals, and yet every request leaves before the first ends."""
    state.script = lambda body: Script(first_s=1.5)
    config = BenchConfig(mode="constant", rate=50, requests=10, input_tokens="8", output_tokens="2")

    result = measure(config, Target(url), tmp_path / "r")

    records = measured(result)
    assert sorted(record.t_intended_ns for record in records) == [round(index * 1e9 / 50) for index in range(10)]
    assert max(record.t_sent_ns for record in records) < min(record.t_end_ns for record in records)
    assert (tmp_path / "r" / "schedule.parquet").exists()


@pytest.mark.slow
def test_trust_W12_a_burst_is_an_open_loop_for_the_load_and_for_its_report(url, state, tmp_path):
    config = BenchConfig(mode="burst", requests=6, max_in_flight=2, input_tokens="8", output_tokens="4")

    analysis = Analysis.of(measure(config, Target(url), tmp_path / "r"))

    manifest = analysis.run.manifest
    assert (config.is_open_loop, manifest.is_open_loop) == (True, True)
    tuned = metric_value(analysis.summary, "ttft_p50_ms", config.is_open_loop)
    table = summary_table([analysis])
    shown = table.loc[table.iloc[:, 0] == "TTFT", "p50"].item()
    assert getattr(shown, "value", shown) == tuned
    assert manifest.to_json()["open_loop"] is True
    assert "not_stationary" not in str(analysis.summary["verdict"])


@pytest.mark.parametrize("concurrency", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_trust_W13_thirty_requests_are_enough_for_a_run(url, state, tmp_path, concurrency):
    config = BenchConfig(concurrency=concurrency, requests=30, input_tokens="8", output_tokens="4")

    summary = Analysis.of(measure(config, Target(url), tmp_path / "r")).summary

    found = {reason["check"] for reason in summary["verdict"]["reasons"]}
    assert not found & {"completions", "steady_state"}


def test_an_in_flight_limit_delays_requests_and_the_wait_is_recorded(url, state, tmp_path):
    config = BenchConfig(mode="burst", requests=6, max_in_flight=2, input_tokens="8", output_tokens="4")

    result = measure(config, Target(url), tmp_path / "r")

    assert [record.status for record in result.records] == ["ok"] * 6
    waits = sorted(record.limit_wait_s for record in result.records)
    assert waits[0] < waits[-1] / 2
    assert waits[-1] > 0.01


def test_a_request_in_flight_after_the_drain_is_unfinished(url, state, tmp_path):
    state.script = lambda body: Script(first_s=60)
    config = BenchConfig(concurrency=2, duration=0.5, warmup=0, drain=0.2, input_tokens="8", output_tokens="2")

    result = measure(config, Target(url), tmp_path / "r")

    assert [record.status for record in result.records] == ["unfinished"] * 2
    assert {record.error_type for record in result.records} == {"first_event/cut"}


@pytest.mark.slow
def test_phases_follow_the_clock(url, state, tmp_path):
    config = BenchConfig(mode="constant", rate=40, duration=0.6, warmup=0.5, input_tokens="8", output_tokens="2")

    result = measure(config, Target(url), tmp_path / "r")

    phases = {record.request_id: record.phase for record in result.records}
    by_start = sorted(result.records, key=lambda record: record.t_intended_ns)
    found = [phases[record.request_id] for record in by_start]
    assert found == ["warmup"] * 20 + ["measure"] * 24 + ["drain"] * (len(found) - 44)
    assert result.manifest.window_end_s == pytest.approx(1.1)
    assert result.manifest.stop_reason == "duration"


@pytest.mark.slow
def test_a_trace_is_clipped_to_the_limits_and_every_request_is_accounted_for(url, state, tmp_path):
    state.max_input_tokens, state.max_total_tokens = 50, 60
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:4{second}.5,{tokens},5" for second, tokens in enumerate((20, 400, 30))]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    config = BenchConfig(mode="trace", workload="azure_llm", trace_file=str(trace), time_scale=0.05)

    result = measure(config, Target(url), tmp_path / "r")

    by_start = sorted(measured(result), key=lambda record: record.t_intended_ns)
    assert [record.t_intended_ns for record in by_start] == [0, 50_000_000, 100_000_000]
    assert [record.input_tokens for record in by_start] == [20, 50, 30]
    assert [record.planned_input_tokens for record in by_start] == [20, 400, 30]
    assert result.manifest.clipped == {"requests": 1, "input_tokens": 350, "output_tokens": 0}
    assert result.manifest.stop_reason == "end_of_trace"


def test_a_server_that_refuses_connections_ends_the_run(state, tmp_path):
    with stream_server(state) as (url, _):
        target = Target(url)
        facts = target.facts()
    assert facts.api == "tgi"

    with pytest.raises(TargetError, match="connection refused"):
        measure(BenchConfig(requests=1), Target(url), tmp_path / "r")


def test_reliability_F43_a_server_that_dies_ends_the_run_and_its_errors_are_kept(tmp_path):
    command = [sys.executable, "-m", "tests.support.servers.serve_stream"]
    config = BenchConfig(concurrency=2, duration=60, warmup=0, input_tokens="8", output_tokens="4")
    requests = tmp_path / "r" / "requests.jsonl"

    with LaunchedTarget(command, tmp_path / "server.log", ready_timeout_s=30) as target:

        def kill_once_measured():
            wait_for(lambda: requests.exists() and requests.stat().st_size)
            target.process.kill()

        killer = threading.Thread(target=kill_once_measured)
        killer.start()
        result = measure(config, target, tmp_path / "r")
        killer.join()

    assert result.manifest.stop_reason == "server_unreachable"
    assert result.manifest.target["info_end"] == {}
    assert result.manifest.target["server_exit_code"] == -signal.SIGKILL
    found = {record.status for record in result.records}
    assert {"ok", "connect_error"} <= found <= {"ok", "connect_error", "truncated"}


@pytest.mark.slow
def test_openai_servers_are_recognised_and_measured(url, state, tmp_path):
    state.has_info = False
    config = BenchConfig(requests=4, input_tokens="16", output_tokens="4")

    result = measure(config, Target(url), tmp_path / "r")

    assert result.manifest.target["api"] == "openai-chat"
    assert result.manifest.length_control == "capped"
    assert [record.tokens_source for record in measured(result)] == ["server_usage"] * 4
    assert generations(state)[0]["model"] == "scripted-model"
    assert "ignore_eos_token" not in generations(state)[0]


def test_a_directory_that_holds_a_run_is_refused(url, tmp_path):
    (tmp_path / "manifest.json").write_text("{}")

    with pytest.raises(UsageError, match="already holds a run"):
        measure(BenchConfig(requests=1), Target(url), tmp_path)


def test_a_full_disk_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "MIN_FREE_BYTES", 2**62)

    with pytest.raises(MeasurementError, match="MiB free, but a run needs"):
        run_directory.make_run_directory(tmp_path / "r")


def test_run_ids_sort_by_time_and_differ():
    assert new_run_id() != new_run_id()


DRIVER = """
import sys
from pathlib import Path
from loadgen.config.bench_config import BenchConfig
from loadgen.interrupts import Interrupted
from loadgen.runner import measure
from loadgen.target.target import Target
config = BenchConfig(concurrency=2, duration=60, warmup=0, drain=30, input_tokens="8", output_tokens="4")
try:
    measure(config, Target(sys.argv[1]), Path(sys.argv[2]))
except Interrupted as interrupted:
    sys.exit(interrupted.exit_code)
"""


def start_driver(url, out):
    return subprocess.Popen([sys.executable, "-c", DRIVER, url, str(out)], stderr=subprocess.PIPE)


def wait_for(condition, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_reliability_F39_first_signal_drains_and_keeps_everything(url, state, tmp_path, number, code):
    driver = start_driver(url, tmp_path / "r")
    wait_for(lambda: len(generations(state)) >= 6)

    driver.send_signal(number)

    assert driver.wait(30) == code
    result = load_run(tmp_path / "r")
    assert {record.status for record in result.records} == {"ok"}
    assert len(result.records) == len(generations(state))
    assert result.manifest.stop_reason == "interrupted"
    driver.stderr.close()


@pytest.mark.slow
def test_a_signal_before_the_first_request_leaves_an_empty_run_that_can_be_reported(url, tmp_path, capsys):
    out = tmp_path / "r"
    driver = start_driver(url, out)
    wait_for(lambda: (out / "worker.log").exists())

    driver.send_signal(signal.SIGINT)

    assert driver.wait(30) == 130
    driver.stderr.close()
    assert show_runs([out], out, is_json=False) == 4
    assert load_run(out).manifest.stop_reason == "interrupted"
    assert capsys.readouterr().out


@pytest.mark.slow
def test_reliability_F39_second_signal_ends_at_once(url, state, tmp_path):
    state.script = lambda body: Script(first_s=20)
    driver = start_driver(url, tmp_path / "r")
    wait_for(lambda: len(generations(state)) >= 2)

    driver.send_signal(signal.SIGINT)
    time.sleep(0.3)
    driver.send_signal(signal.SIGINT)

    assert driver.wait(10) == 130
    driver.stderr.close()


@pytest.mark.slow
def test_reliability_F38_a_killed_bench_leaves_a_valid_prefix_and_no_worker(url, state, tmp_path, capsys):
    out = tmp_path / "r"
    driver = start_driver(url, out)
    wait_for(lambda: len(generations(state)) >= 8)

    driver.kill()
    driver.wait()
    driver.stderr.close()

    wait_for(lambda: not workers_of(out))
    records = load_run(out).records
    assert len(records) >= 4
    assert {record.status for record in records} == {"ok"}
    show_runs([out], out, is_json=False)
    shown = capsys.readouterr().out
    assert "ended by a crash" in shown
    assert "invalid: incomplete: stopped after" in shown
    assert (out / "report.html").exists()


def workers_of(out):
    """Processes that have the records of this run open."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                files = {file.readlink() for file in (process / "fd").iterdir()}
                found += [process.name] if out / "requests.jsonl" in files else []
    return found


@pytest.mark.slow
def test_a_run_in_a_thread_needs_no_signal_handlers(url, tmp_path):
    results = []
    config = BenchConfig(requests=2, input_tokens="8", output_tokens="2")
    thread = threading.Thread(target=lambda: results.append(measure(config, Target(url), tmp_path / "r")))

    thread.start()
    thread.join(60)

    assert len(measured(results[0])) == 2


@pytest.mark.slow
def test_trust_3a_the_manifest_has_the_source_of_the_arrival_times(url, tmp_path):
    config = BenchConfig(mode="burst", requests=2, input_tokens="8", output_tokens="4")

    result = measure(config, Target(url), tmp_path / "r")

    counts = load_run(tmp_path / "r").manifest.arrival_times
    assert counts["source"] in ("kernel", "mixed", "read")
    assert counts["stamped"] + counts["unstamped"] > 0
    assert counts["rejected"] == 0
    assert all(record.t_first_read_ns >= record.t_first_ns for record in result.records)
    assert all(record.read_late_max_s >= 0 for record in result.records)
