"""Several real load-making processes against a scripted server: one load, one run directory."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgpack
import pyarrow.parquet as pq
import pytest
import zmq

from loadgen.config.bench_config import BenchConfig
from loadgen.runner import measure
from loadgen.target.target import Target
from reports.metrics.summary import summarize
from reports.saved_run import load_run
from tests.support.measured_requests import measured
from tests.support.servers.stream_server import Script, ServerState

COMMAND = [sys.executable, "-m", "loadgen.cli", "run"]
ROOT = Path(__file__).parents[3]
SHORT = ("--input-tokens", "8", "--output-tokens", "4")
LONG_RUN = ("--workers", "2", "--concurrency", "4", "--duration", "60", "--warmup", "0", *SHORT)


@pytest.fixture
def state():
    return ServerState(script=lambda body: Script(first_s=0.01, gap_s=0.005))


def sent(state):
    return [request["body"]["inputs"] for request in state.requests if request["path"] != "/tokenize"]


def start(*words, cwd=None, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd
    )


def wait_for(condition, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.05)


def load_makers(out):
    """Pid of every process that has a records file of this run open, by the file's name."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                files = {file.readlink() for file in (process / "fd").iterdir()}
            except OSError:
                continue
            found |= {file.name: int(process.name) for file in files if file.parent == out and "requests" in file.name}
    return found


def most_in_flight(records, worker):
    own = [record for record in records if record.worker == worker]
    moments = sorted([(record.t_sent_ns, 1) for record in own] + [(record.t_end_ns, -1) for record in own])
    return max(itertools.accumulate(change for _, change in moments))


@pytest.mark.slow
def test_two_workers_send_the_one_schedule_and_their_records_are_one_run(url, state, tmp_path):
    config = BenchConfig(
        mode="poisson", rate=40, duration=1.5, warmup=0.2, input_tokens="8", output_tokens="4", workers=2
    )

    result = measure(config, Target(url), tmp_path / "r")

    scheduled = pq.read_table(tmp_path / "r" / "schedule.parquet").to_pydict()
    records = sorted(result.records, key=lambda record: record.t_intended_ns)
    assert len({record.request_id for record in records}) == len(records) == len(set(sent(state)))
    records = [record for record in records if record.phase != "drain"]
    assert [record.t_intended_ns for record in records] == scheduled["t_intended_ns"]
    assert [record.prompt_id for record in records] == scheduled["prompt_id"]
    assert [record.worker for record in records] == [number % 2 for number in range(len(records))]
    assert {record.status for record in records} == {"ok"}
    assert result.manifest.workers == 2
    assert result.manifest.stop_reason == "duration"
    assert result.manifest.window_end_s == pytest.approx(1.7)
    assert result.manifest.clock["offset_uncertainty_s"] == 0.0
    assert [worker["worker"] for worker in result.client["workers"]] == [0, 1]
    assert all(worker["loop_lag_p99_s"] is not None for worker in result.client["workers"])
    assert {row["worker"] for row in result.timeseries} == {0, 1}
    # On one machine the clocks are one, and pings that were not needed agree.
    assert all(abs(w["clock_measured_s"]) <= w["clock_measured_error_s"] for w in result.client["workers"])


@pytest.mark.slow
def test_reliability_F41_a_lost_worker_marks_the_run_and_the_others_finish(url, state, tmp_path):
    out = tmp_path / "r"
    command = start("--url", url, *LONG_RUN, "--duration", "4", "--out", str(out))
    wait_for(lambda: len(sent(state)) >= 12)

    os.kill(load_makers(out)["requests-1.jsonl"], signal.SIGKILL)

    stdout, stderr = command.communicate(timeout=60)
    assert command.returncode == 4, stderr
    assert stdout, stderr
    assert "worker 1 with 50 % of the load (its process ended with exit code -9)" in stdout
    assert "worker 1 on" in stderr
    result = load_run(out)
    last_s = {worker: max(r.t_end_ns for r in result.records if r.worker == worker) / 1e9 for worker in (0, 1)}
    assert last_s[1] < last_s[0]
    assert result.manifest.stop_reason == "duration"
    assert result.client["lost_workers"] == 1
    assert summarize(result)["verdict"]["status"] == "invalid"


@pytest.mark.slow
def test_reliability_F38_a_killed_bench_with_two_workers_leaves_valid_prefixes_and_no_process(url, state, tmp_path):
    out = tmp_path / "r"
    command = start("--url", url, *LONG_RUN, "--out", str(out))
    wait_for(lambda: len(sent(state)) >= 24)
    processes = load_makers(out).values()
    assert len(processes) == 2

    command.kill()
    command.communicate()

    wait_for(lambda: not load_makers(out))
    records = load_run(out).records
    assert {record.worker for record in records} == {0, 1}
    assert {record.status for record in records} == {"ok"}
    # Only the requests in flight are missing.
    assert len(sent(state)) - len(records) <= 8
    reported = subprocess.run([*COMMAND[:-1], "report", str(out)], capture_output=True, text=True)
    assert reported.returncode == 0
    assert "ended by a crash" in reported.stdout
    assert (out / "report.html").exists()


def get(address, path, **headers):
    request = urllib.request.Request(
        address + path, headers={name.capitalize(): text for name, text in headers.items()}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_reliability_F39_the_web_ui_shows_llm_metrics_and_an_interrupt_stops_all_workers(url, state, tmp_path):
    out = tmp_path / "r"
    command = start("--url", url, *LONG_RUN, "--web", "127.0.0.1:0", "--out", str(out))
    address = next(line.split()[5] for line in command.stderr if "web UI" in line)
    early = get(address, "/")
    wait_for(lambda: len(json.loads(get(address, "/llm/history"))) >= 2)

    assert "The load is being prepared" in early
    # locust keeps an answer for two seconds.
    wait_for(lambda: {"TTFT", "TPOT"} <= {row["name"] for row in json.loads(get(address, "/stats/requests"))["stats"]})

    page, statistics = get(address, "/"), json.loads(get(address, "/stats/requests"))
    assert '"extended_tabs": [{"key": "llm", "title": "LLM"}]' in page
    assert 'id="llm-charts"' in page
    assert f'data-report="{out / "report.html"}"' in page
    assert "Running streams" in page
    assert statistics["user_count"] == 4
    assert statistics["worker_count"] == 2
    shown = {row["metric"]: row for row in statistics["extended_stats"][0]["data"]}
    assert shown["TTFT (ms)"]["p50"] >= 10
    assert shown["TPOT (ms)"]["p50"] >= 4
    assert shown["Running streams"]["now"] >= 1
    assert "The command line defines the load" in get(address, "/user")
    elsewhere = (
        {"origin": "http://elsewhere.example"},
        {"host": "elsewhere.example"},
        {"sec-fetch-site": "cross-site"},
    )
    for refused in elsewhere:
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(address, "/stop", **refused)

    command.send_signal(signal.SIGINT)

    command.communicate(timeout=60)
    assert command.returncode == 130
    result = load_run(out)
    assert result.manifest.stop_reason == "interrupted"
    assert {record.status for record in result.records} == {"ok"}
    assert len(result.records) == len(sent(state))
    assert not load_makers(out)


@pytest.mark.slow
def test_the_web_ui_of_one_worker_shows_its_latencies(url, tmp_path):
    command = start("--url", url, *LONG_RUN, "--workers", "1", "--web", "127.0.0.1:0", "--out", str(tmp_path / "r"))
    address = next(line.split()[5] for line in command.stderr if "web UI" in line)

    wait_for(lambda: any(row["ttft_p50_ms"] for row in json.loads(get(address, "/llm/history"))))

    command.send_signal(signal.SIGINT)
    command.communicate(timeout=60)
    assert command.returncode == 130


def send_garbage(address):
    """Unencrypted ZeroMQ frames, and bytes that are not ZeroMQ."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://{address}")
        for frames in ([b""], [], [b"\xff" * 100], [msgpack.dumps(("client_ready", "2", "x"))]):
            stranger.send_multipart(frames or [b"", b""])
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as raw:
            raw.sendall(bytes(range(256)))
        stranger.close(linger=200)


@pytest.mark.slow
def test_workers_join_a_master_and_receive_its_files_and_a_wrong_key_is_refused(url, state, tmp_path):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "asked.jsonl").write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(30)))
    out = tmp_path / "r"
    load = (
        "--workload",
        "prompts",
        "--prompts-file",
        "asked.jsonl",
        "--salt",
        "off",
        "--output-tokens",
        "4",
        "--requests",
        "30",
    )
    where = ("--master", "--expect-workers", "2", "--master-bind-port", "0", "--concurrency", "3")
    master = start("--url", url, *load, *where, "--out", str(out), cwd=home, TGI_BENCH_JOIN_KEY="ours")
    notice = next(line for line in master.stderr if "--join" in line)
    address = notice.split()[-1]
    assert "ours" not in notice
    send_garbage(address)

    stranger = start("--join", address, cwd=elsewhere, TGI_BENCH_JOIN_KEY="guessed")
    joined = [start("--join", address, cwd=elsewhere, TGI_BENCH_JOIN_KEY="ours") for _ in range(2)]

    refused = stranger.communicate(timeout=60)[1]
    assert stranger.returncode == 4
    assert "wrong key: TGI_BENCH_JOIN_KEY" in refused
    for number, worker in enumerate(joined):
        assert "the master stored the records" in worker.communicate(timeout=60)[1], number
        assert worker.returncode == 0
    master.communicate(timeout=60)
    result = load_run(out)
    assert set(sent(state)) <= {f"question {number}" for number in range(30)}
    assert len({record.prompt_id for record in measured(result)}) == 30
    assert [most_in_flight(result.records, worker) for worker in (0, 1)] == [2, 1]
    assert {record.status for record in measured(result)} == {"ok"}
    assert summarize(result)["verdict"]["status"] in ("valid", "degraded", "invalid")
