"""The launcher as a process, with stub programs for its children."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from reference_server.launcher.guardian import is_alive, start_time
from tests.support.servers.ports import free_port

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "support" / "servers" / "stub_launch.py"


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    """Poll until `condition` holds; the limit only ends a test that hangs."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.02)


@dataclass
class Launched:
    """A launcher, its event log, and the children it has started."""

    process: subprocess.Popen[str]
    log: Path
    socket_directory: Path
    starts: dict[int, str | None] = field(default_factory=dict)

    @property
    def events(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        for line in lines:
            pid = int(line.split()[1])
            self.starts.setdefault(pid, start_time(pid))
        return [line.split()[0] for line in lines]

    def pid_of(self, event: str) -> int:
        return next(int(line.split()[1]) for line in self.log.read_text().splitlines() if line.startswith(f"{event} "))

    def until(self, event: str) -> None:
        wait_for(lambda: event in self.events or self.process.poll() is not None, event)
        assert event in self.events

    def end(self) -> tuple[int, str]:
        """Exit status and everything printed; no child is left, and no socket directory."""
        output, _ = self.process.communicate(timeout=60)
        self.assert_nothing_left()
        return self.process.returncode, output

    def assert_nothing_left(self) -> None:
        assert self.events is not None
        wait_for(
            lambda: not any(start is not None and is_alive(pid, start) for pid, start in self.starts.items()),
            "end of all children",
        )
        wait_for(lambda: list(self.socket_directory.iterdir()) == [], "removal of the socket directory")


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    running: list[Launched] = []

    def start(*flags: str, model: str = "preset:tiny-llama", **environ: str) -> Launched:
        sockets = tmp_path / "sockets"
        sockets.mkdir(exist_ok=True)
        inherited = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        variables = {"STUB_LOG": str(tmp_path / "events"), "TMPDIR": str(sockets), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, str(STUB), "--model-id", model, "--port", str(free_port()), *flags],
            env=inherited | variables | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(Launched(process, tmp_path / "events", sockets))
        return running[-1]

    yield start
    for launched in running:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.communicate()
        with contextlib.suppress(AssertionError):
            launched.assert_nothing_left()


@pytest.mark.slow
def test_launcher_L4_a_shard_and_a_socket_for_each_visible_device(launch: Launch, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir(mode=0o700)
    launched = launch("--shard-uds-path", str(directory / "s"), CUDA_VISIBLE_DEVICES="0,1,2")
    launched.until("router-serving")

    assert sorted(path.name for path in directory.iterdir()) == [
        *("s-0", "s-0.link", "s-1", "s-1.link", "s-2", "s-2.link"),
    ]
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0


@pytest.mark.slow
def test_launcher_L17_a_shard_that_leaves_with_0_ends_everything(launch: Launch) -> None:
    launched = launch(STUB_SHARD="exit=0")

    status, output = launched.end()

    assert status == 1
    assert "Error: ShardFailed: shard 0 exited with status 0" in output
    assert "the stub was told to leave" in output
    assert "router-sigterm" in launched.events


@pytest.mark.slow
def test_launcher_L18_the_router_is_stopped_before_any_shard(launch: Launch) -> None:
    launched = launch("--num-shard", "2")
    launched.until("router-serving")

    launched.process.send_signal(signal.SIGTERM)
    status, output = launched.end()

    events = launched.events
    assert status == 0
    assert events.index("router-sigterm") < min(events.index("shard-0-sigterm"), events.index("shard-1-sigterm"))
    assert "shard-manager: stub 1 listens rank=1" in output
    assert "\nstub router listens\n" in output
    assert "\na line on stderr\n" in output


def test_launcher_L19_children_that_ignore_sigterm_are_killed(launch: Launch) -> None:
    launched = launch("-g", "1", STUB_SHARD="deaf", STUB_ROUTER="deaf")
    launched.until("router-serving")

    launched.process.send_signal(signal.SIGTERM)
    status, output = launched.end()

    assert status == 0
    assert "router did not end 1 s after SIGTERM: killing it" in output
    assert "shard 0 did not end 1 s after SIGTERM: killing it" in output


@pytest.mark.slow
def test_launcher_L20_the_environment_report_does_not_stop_the_launch(launch: Launch) -> None:
    launched = launch("--env")
    launched.until("router-serving")

    launched.process.send_signal(signal.SIGINT)
    status, output = launched.end()

    assert status == 0
    assert "Runtime environment" in output
    assert "nvidia-smi: " in output


def test_a_killed_shard_ends_everything_and_is_named(launch: Launch) -> None:
    launched = launch("--num-shard", "2")
    launched.until("router-serving")

    os.kill(launched.pid_of("shard-1-serving"), signal.SIGKILL)
    status, output = launched.end()

    assert status == 1
    assert "Error: ShardFailed: shard 1 was killed by signal 9 (SIGKILL)" in output


@pytest.mark.slow
def test_a_shard_that_cannot_start_stops_the_others(launch: Launch) -> None:
    launched = launch("--num-shard", "2", STUB_SHARD="early=3,slow", STUB_EXIT_RANK="1")

    status, output = launched.end()

    assert status == 1
    assert "Error: ShardCannotStart: shard 1 exited with status 3" in output
    assert "no memory left" in output
    assert "router-serving" not in launched.events


@pytest.mark.slow
def test_a_shard_that_hangs_does_not_keep_a_failed_launch_up(launch: Launch) -> None:
    launched = launch("--num-shard", "2", "-g", "3600", STUB_SHARD="exit=1", STUB_EXIT_RANK="1")
    launched.until("router-serving")
    os.kill(launched.pid_of("shard-0-serving"), signal.SIGSTOP)

    status, output = launched.end()

    assert status == 1
    assert "Error: ShardFailed: shard 1 exited with status 1" in output
    assert "shard 0 did not end 3 s after SIGTERM: killing it" in output


@pytest.mark.slow
def test_a_router_that_ends_stops_the_shards(launch: Launch) -> None:
    launched = launch(STUB_ROUTER="exit=0")

    status, output = launched.end()

    assert status == 1
    assert "Error: WebserverFailed: the router exited with status 0" in output


def test_a_download_that_fails_names_the_built_in_models(launch: Launch) -> None:
    launched = launch(model="nobody/nothing", STUB_SHARD="download=1", HF_HUB_OFFLINE="1")

    status, output = launched.end()

    assert status == 1
    assert "the hub is closed" in output
    assert "Error: DownloadError: could not load the weights of nobody/nothing" in output
    assert "preset:tiny-llama" in output
    assert launched.events == ["download"]


@pytest.mark.slow
def test_a_stop_while_shards_load_is_no_failure(launch: Launch) -> None:
    launched = launch(STUB_SHARD="slow")
    launched.until("shard-0-start")

    launched.process.send_signal(signal.SIGHUP)
    status, _ = launched.end()

    assert status == 0
    assert "router-serving" not in launched.events


@pytest.mark.slow
def test_a_stop_while_downloading_is_no_failure(launch: Launch) -> None:
    launched = launch(model="nobody/nothing", STUB_SHARD="download=hang", HF_HUB_OFFLINE="1")
    launched.until("download")

    launched.process.send_signal(signal.SIGTERM)

    assert launched.end()[0] == 0
    assert launched.events == ["download"]


@pytest.mark.slow
def test_a_second_signal_kills_processes_that_ignore_the_first(launch: Launch) -> None:
    launched = launch("-g", "3600", STUB_SHARD="deaf", STUB_ROUTER="deaf")
    launched.until("router-serving")

    launched.process.send_signal(signal.SIGTERM)
    launched.until("router-sigterm")
    # Two signals in a row are one request: the second one has to come later.
    while launched.process.poll() is None:
        time.sleep(0.2)
        launched.process.send_signal(signal.SIGTERM)
    status, output = launched.end()

    assert status == 0
    assert "SIGTERM again: killing the remaining processes" in output


@pytest.mark.slow
def test_an_unread_log_blocks_no_process(launch: Launch) -> None:
    launched = launch()
    launched.until("router-serving")
    assert launched.process.stdout is not None

    launched.process.stdout.close()
    launched.process.send_signal(signal.SIGTERM)

    assert launched.process.wait(timeout=30) == 0
    launched.assert_nothing_left()


def test_a_killed_launcher_leaves_nothing_behind(launch: Launch) -> None:
    launched = launch("--num-shard", "2", STUB_SHARD="deaf")
    launched.until("router-serving")
    assert launched.events.count("router-serving") == 1

    launched.process.kill()
    launched.process.communicate()

    launched.assert_nothing_left()
    assert "router-sigterm" in launched.events


def test_secrets_reach_the_router_by_environment_only(launch: Launch, tmp_path: Path) -> None:
    launched = launch("--api-key", "hunter2", "--cors-allow-origin", "http://a", HF_API_TOKEN="hf_secret")
    launched.until("router-serving")
    router = launched.pid_of("router-serving")
    environ = Path(f"/proc/{router}/environ").read_text()
    shard_environ = Path(f"/proc/{launched.pid_of('shard-0-start')}/environ").read_text()

    launched.process.send_signal(signal.SIGTERM)
    _, output = launched.end()

    argv = json.loads((tmp_path / "events.argv").read_text())
    assert "hunter2" not in output + " ".join(argv)
    assert "hf_secret" not in output + " ".join(argv)
    assert "\0API_KEY=hunter2\0" in environ
    assert "\0HF_TOKEN=hf_secret\0" in environ
    assert "hunter2" not in shard_environ
    assert argv[argv.index("--cors-allow-origin") + 1] == "http://a"


def test_the_router_alone_serves_the_model_servers_of_shard_addr(launch: Launch, tmp_path: Path) -> None:
    launched = launch("--no-shards", "--shard-addr", "127.0.0.1:1,127.0.0.1:2")
    launched.until("router-serving")

    launched.process.send_signal(signal.SIGTERM)
    status, _ = launched.end()

    argv = json.loads((tmp_path / "events.argv").read_text())
    assert status == 0
    assert launched.events == ["router-serving", "router-sigterm"]
    assert argv[argv.index("--shard-addr") + 1] == "127.0.0.1:1,127.0.0.1:2"
    assert "--master-shard-uds-path" not in argv


def test_reliability_F26_a_taken_port_fails_before_anything_starts(launch: Launch) -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        launched = launch("--port", str(port))

        status, output = launched.end()

    assert status == 1
    assert f"Error: ArgumentValidation: port {port} is already in use" in output
    assert launched.events == []


@pytest.mark.slow
def test_an_explicit_socket_prefix_is_honoured(launch: Launch, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir(mode=0o700)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(directory / "s-0"))
    stale.close()
    launched = launch("--shard-uds-path", str(directory / "s"))
    launched.until("router-serving")

    assert (directory / "s-0").is_socket()
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
