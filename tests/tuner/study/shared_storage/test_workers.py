"""Whole `tgi-tune` processes on one storage proxy: they share a study's trials, those of a killed worker included."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest

from tests.support.servers.ports import free_port
from tuner.study.optuna_study import LEASE, OptunaStudy
from tuner.study.shared_storage.storage import open_storage
from tuner.study.shared_storage.token import TOKEN_VARIABLE

ROOT = Path(__file__).parents[4]
TRIALS, DEADLINE_S = 8, 300.0
# A server whose setting is the time between its tokens.
PROFILE = """
name = "paced"
command = "{python} -m tests.support.servers.serve_stream --port {{port}} --model {{model}}"
[setting.gap]
flag = "--gap"
type = "float"
low = 0.001
high = 0.02
default = 0.01
"""
SPACE = """
[study]
name = "shared"
trials = {trials}
noise_runs = 0
drift_check_every = 0
sampler = "random"
[server]
profile = "{profile}"
model_id = "paced"
[load]
mode = "closed"
concurrency = 2
input_tokens = "16"
output_tokens = "16"
warmup = 0
requests = 40
[objective]
maximize = "output_tokens_per_s"
[confirm]
rounds = 0
"""


class Place:
    """A separate machine: a folder for studies and one for device locks."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        (folder / "run").mkdir(parents=True)
        self._environment = {
            **os.environ,
            TOKEN_VARIABLE: token,
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(folder / "run"),
        }

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        with (self.folder / "output.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tuner.cli", *words],
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output.log").read_text()

    @property
    def running_trial(self) -> int | None:
        """The number of a trial that is being measured here."""
        for path in sorted(self.folder.glob("studies/shared/trials/*/settings.json")):
            if "measuring" in _steps(path.parent) and not (path.parent / "result.json").exists():
                return int(path.parent.name)
        return None


def _steps(directory: Path) -> str:
    events = directory / "events.jsonl"
    return events.read_text() if events.exists() else ""


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def proxy(database: Path) -> Iterator[tuple[str, str]]:
    """The address and the token of a storage proxy."""
    words = [sys.executable, "-m", "tuner.cli", "storage", f"sqlite:{database}", "--port", str(free_port())]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            token = re.search(rf"{TOKEN_VARIABLE}=(\S+) ", line)
            assert token is not None
            yield line.rpartition(" ")[2].strip(), token[1]
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_servers_7_two_workers_on_one_proxy_share_a_study_and_the_trial_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "paced.toml").write_text(PROFILE.format(python=sys.executable))
    space = tmp_path / "space.toml"
    space.write_text(SPACE.format(trials=TRIALS, profile=tmp_path / "paced.toml"))
    started = []
    with proxy(tmp_path / "studies.db") as (storage, token), contextlib.ExitStack() as stack:
        leader, first, second = (Place(tmp_path / name, token) for name in ("leader", "first", "second"))
        stack.callback(lambda: [_end(process) for process in started])
        started.append(leader.start("run", str(space), "--storage", storage))
        until(lambda: _steps(leader.folder / "studies/shared/trials/0000"), "the leader measures the defaults")
        join = ("worker", "--study", "shared", "--storage", storage, "--allow-command")
        started += [first.start(*join), second.start(*join)]
        until(lambda: first.running_trial is not None, "the first worker measures a trial")
        lost = first.running_trial
        os.killpg(started[1].pid, signal.SIGKILL)
        until(lambda: started[0].poll() is not None, "the leader ends")
        until(lambda: started[2].poll() is not None, "the second worker ends")
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        name = _stored_name(leader)
        trials = optuna.load_study(study_name=name, storage=open_storage(storage, tmp_path)).trials
        measured_by = OptunaStudy(tmp_path, seed=0, storage=storage, name=name).measured_by()

    assert (started[0].returncode, started[2].returncode) == (0, 0), leader.output + second.output
    results = [json.loads(path.read_text()) for path in leader.folder.glob("studies/shared/trials/*/result.json")]
    assert sum(each["outcome"] == "measured" for each in results) == TRIALS
    # The leases name the process of each trial; the killed worker's trial failed and its settings were measured again.
    leases = {each.number: each.user_attrs[LEASE]["pid"] for each in trials if LEASE in each.user_attrs}
    killed = next(each for each in trials if leases.get(each.number) == started[1].pid and each.number == lost)
    assert killed.state.name == "FAIL"
    # A worker that exceeds the budget returns its settings, which also leaves a failed trial.
    (again,) = (each for each in trials if each.params == killed.params and each.state.name == "COMPLETE")
    assert leases[again.number] in (started[0].pid, started[2].pid)
    # The output shows the share of the worker that was not killed.
    shares = {int(name.rpartition("/")[2]): count for name, count in measured_by.items()}
    assert shares[started[2].pid] >= 1
    assert f"/{started[2].pid}: {shares[started[2].pid]}" in leader.output
    assert "trials by worker" in (leader.folder / "studies/shared/report.md").read_text()


def _stored_name(leader: Place) -> str:
    """The name that the leader's study has in the storage."""
    identity = json.loads((leader.folder / "studies/shared/study.json").read_text())["identity"]
    return f"shared-{identity['ranges'][:8]}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
