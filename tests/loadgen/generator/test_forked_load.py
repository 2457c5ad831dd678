"""Forked load processes: runs with them are complete, and nothing outlives the forker or its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadgen import runner
from loadgen.config.bench_config import BenchConfig
from loadgen.config.distribution import Distribution
from loadgen.errors import WorkerError
from loadgen.generator.forked_load import LoadForker, forked_loads
from loadgen.target.target import Target
from reports.run_schema import Status
from tests.support.servers.stream_server import ServerState, stream_server

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks only on Linux")

LOAD = BenchConfig(mode="closed", concurrency=2, requests=6, warmup=0.0, input_tokens="8", output_tokens="4")


@pytest.mark.slow
def test_runs_on_one_forker_are_complete_runs_with_processes_of_their_own(tmp_path: Path):
    with stream_server(ServerState()) as (url, _), forked_loads() as start:
        results = [runner.measure(LOAD, Target(url), tmp_path / f"{n}", start_load=start) for n in (1, 2)]

    for result in results:
        assert [record.status for record in result.records].count(Status.OK) >= 6
        assert result.manifest.stop_reason == "requests"
    assert results[0].manifest.run_id != results[1].manifest.run_id


@pytest.mark.slow
def test_a_load_of_several_workers_is_not_forked(tmp_path: Path):
    with stream_server(ServerState()) as (url, _), forked_loads() as start:
        result = runner.measure(
            LOAD.model_copy(update={"workers": 2}),
            Target(url),
            tmp_path / "run",
            distribution=Distribution(2),
            start_load=start,
        )

    assert len(result.client["workers"]) == 2


@pytest.mark.slow
def test_a_run_whose_forker_was_killed_is_refused_and_the_next_one_has_a_new_process(tmp_path: Path):
    forker = LoadForker()
    long = LOAD.model_copy(update={"requests": None, "duration": 60.0})

    class KillsForker:
        """The progress of a run that kills the forker once the load has begun."""

        def __getattr__(self, _: str):
            return lambda *_: None

        def update(self, _: object) -> None:
            os.kill(forker_pid(), signal.SIGKILL)

    with stream_server(ServerState()) as (url, _):
        with pytest.raises(WorkerError, match="ended early"):
            runner.measure(long, Target(url), tmp_path / "killed", KillsForker(), start_load=forker.start)
        result = runner.measure(LOAD, Target(url), tmp_path / "next", start_load=forker.start)
    forker.close()

    assert [record.status for record in result.records].count(Status.OK) >= 6


def forker_pid() -> int:
    """The child of this process that forks loads."""
    for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        if b"loadgen.generator.load_forker" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("no forker runs")


def test_the_forker_ends_with_a_parent_that_is_killed():
    script = (
        "import time; from loadgen.generator.forked_load import LoadForker; "
        "LoadForker(); print(flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    [forker] = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()

    parent.kill()
    parent.wait()

    deadline = time.monotonic() + 30
    while Path(f"/proc/{forker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{forker}").exists()
    parent.stdout.close()
