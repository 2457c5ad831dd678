import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reference_server.launcher.guardian import Registry, is_alive, start_time, watch

SLEEP = [sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(60)"]
DEAF = [
    sys.executable, "-S", "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)",
]  # fmt: skip


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.communicate()


def spawn(children: list[subprocess.Popen[str]], argv: list[str]) -> subprocess.Popen[str]:
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, process_group=0)
    children.append(child)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def test_when_the_launcher_is_gone_its_children_and_paths_are(
    children: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    shard, router = spawn(children, DEAF), spawn(children, SLEEP)
    directory = tmp_path / "a directory"
    directory.mkdir()

    watch(
        [
            f"child {shard.pid} {start_time(shard.pid)} kill\n",
            f"child {router.pid} {start_time(router.pid)} drain\n",
            f"path {directory}\n",
        ]
    )

    assert shard.wait() == -9
    assert router.wait() == -15
    assert not directory.exists()


def test_a_launcher_that_reports_done_leaves_nothing_to_do(children: list[subprocess.Popen[str]]) -> None:
    child = spawn(children, SLEEP)

    watch([f"child {child.pid} {start_time(child.pid)} kill\n", "done\n"])

    assert child.poll() is None


def test_a_pid_that_has_another_start_time_is_left_alone(children: list[subprocess.Popen[str]]) -> None:
    child = spawn(children, SLEEP)

    watch([f"child {child.pid} 1 drain\n"])

    assert child.poll() is None


def test_a_child_that_ended_is_forgotten(children: list[subprocess.Popen[str]]) -> None:
    child = spawn(children, SLEEP)

    watch([f"child {child.pid} {start_time(child.pid)} kill\n", f"ended {child.pid}\n"])

    assert child.poll() is None


def test_a_router_that_does_not_drain_is_killed(children: list[subprocess.Popen[str]]) -> None:
    child = spawn(children, DEAF)
    registry = Registry()
    registry.add(f"child {child.pid} {start_time(child.pid)} drain\n")

    registry.end(drain_s=0.1)

    assert child.wait() == -9


def test_a_zombie_is_not_alive(children: list[subprocess.Popen[str]]) -> None:
    child = spawn(children, SLEEP)
    start = start_time(child.pid)
    assert start is not None
    assert is_alive(child.pid, start)

    child.kill()
    child.wait()

    assert not is_alive(child.pid, start)
