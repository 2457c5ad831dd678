import contextlib
import os
import re
import socket
import subprocess
import sys
import time

import pytest

from loadgen.errors import StartError, UsageError
from loadgen.target.launched import launched_target
from loadgen.target.launched.launch import LaunchedProcess, port_in, reserve_ports, split_command
from loadgen.target.launched.launched_target import LaunchedTarget
from tests.support.servers.stream_server import stream_server

SERVE = [sys.executable, "-m", "tests.support.servers.serve_stream"]


def launched(tmp_path, *arguments, **options):
    return LaunchedTarget([*SERVE, *arguments], tmp_path / "server.log", ready_timeout_s=20, **options)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_free_ports_and_paths_are_passed_in_the_environment(tmp_path):
    with launched(tmp_path) as target:
        assert target.facts().api == "tgi"
        pid = target.process.pid

    log = (tmp_path / "server.log").read_text()
    found = dict(re.findall(r"'(\w+)': '([^']*)'", log))
    assert f"http://127.0.0.1:{found['PORT']}" == target.url
    assert found["HOSTNAME"] == "127.0.0.1"
    assert len({found["PORT"], found["MASTER_PORT"], found["PROMETHEUS_PORT"]}) == 3
    assert len(found["SHARD_UDS_PATH"]) < 80
    assert not is_running(pid)


def test_the_port_is_inserted_into_the_command(tmp_path):
    with launched(tmp_path, "--port={port}") as target:
        assert target.launch_argv[-1] == f"--port={target.process.port}"


def test_an_explicit_port_wins(tmp_path):
    with contextlib.ExitStack() as held:
        (port,) = reserve_ports(held, 1)

    with launched(tmp_path, "--port", str(port)) as target:
        assert target.url == f"http://127.0.0.1:{port}"


def test_a_server_that_ends_early_fails_the_start_with_its_log(tmp_path):
    with pytest.raises(StartError, match="exit code 1 before it was ready") as failed, launched(tmp_path, "--fail"):
        pytest.fail("it did not start")

    assert "scripted failure: no memory left" in str(failed.value)
    assert failed.value.exit_code == 4


def test_a_missing_command_fails_the_start(tmp_path):
    with pytest.raises(StartError, match="no-such-server"), LaunchedTarget("no-such-server", tmp_path / "log"):
        pytest.fail("it did not start")


def test_a_server_that_is_not_ready_in_time_fails_the_start(tmp_path):
    target = LaunchedTarget([*SERVE, "--slow-start", "60"], tmp_path / "log", ready_timeout_s=0.5)

    with pytest.raises(StartError, match=r"not ready after 0.5 s"), target:
        pytest.fail("it did not start")

    assert not is_running(target.process.pid)


def test_waiting_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(launched_target, "REPORT_WAIT_EVERY_S", 0.2)
    reported = []

    with launched(tmp_path, "--slow-start", "0.8", on_wait=reported.append):
        pass

    assert reported


def test_a_second_signal_kills_a_server_that_ignores_sigterm(tmp_path):
    class Urgent(KeyboardInterrupt):
        is_urgent = True

    with pytest.raises(Urgent), launched(tmp_path, "--ignore-sigterm") as target:
        raise Urgent

    assert not is_running(target.process.pid)


def test_a_server_ends_with_the_bench_that_started_it(tmp_path):
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from loadgen.target.launched.launch import LaunchedProcess\n"
        f"process = LaunchedProcess({SERVE!r}, Path({str(tmp_path / 'log')!r}))\n"
        "process.start()\n"
        "print(process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pid = int(bench.stdout.readline())
    while "environment" not in (tmp_path / "log").read_text():
        time.sleep(0.02)

    bench.kill()
    bench.wait()
    bench.stdin.close()
    bench.stdout.close()

    deadline_s = time.monotonic() + 15
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_running(pid)


def test_a_port_in_use_is_detected_and_another_one_tried(tmp_path):
    """The first attempt fails as if its port had been taken in between; the second is left alone."""
    marker = tmp_path / "tried"
    code = (
        "import pathlib, sys, runpy\n"
        f"marker = pathlib.Path({str(marker)!r})\n"
        "if not marker.exists():\n"
        "    marker.touch()\n"
        "    sys.exit('OSError: [Errno 98] Address already in use')\n"
        "sys.argv = ['serve']\n"
        "runpy.run_module('tests.support.servers.serve_stream', run_name='__main__')\n"
    )

    with LaunchedTarget([sys.executable, "-c", code], tmp_path / "log", ready_timeout_s=20) as target:
        assert target.process.attempts_left == 3


def test_reliability_F37_a_port_in_use_by_another_server_is_refused(tmp_path):
    with stream_server() as (url, _):
        port = url.rpartition(":")[2]

        with (
            pytest.raises(StartError, match=f"port {port} of the command is in use"),
            LaunchedTarget([*SERVE, "--port", port], tmp_path / "log"),
        ):
            pytest.fail("it did not start")


def test_reserved_ports_are_distinct_and_in_use():
    with contextlib.ExitStack() as held:
        ports = reserve_ports(held, 3)

        assert len(set(ports)) == 3
        for port in ports:
            with socket.socket() as sock, pytest.raises(OSError, match="in use"):
                sock.bind(("127.0.0.1", port))


def test_commands_are_split_like_a_shell_does():
    assert split_command("serve --name 'a b' --port {port}") == ["serve", "--name", "a b", "--port", "{port}"]
    assert port_in(["serve", "--port"]) is None
    for wrong in ("", "serve 'open"):
        with pytest.raises(UsageError):
            split_command(wrong)


def test_a_process_that_was_never_started_can_be_stopped(tmp_path):
    process = LaunchedProcess(["x"], tmp_path / "log")

    process.stop()
    process.kill()

    assert process.exit_code is None
