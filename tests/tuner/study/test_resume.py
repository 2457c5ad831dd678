import contextlib
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.samples.formula_study import STEPS
from tests.tuner.studies import FormulaServer, open_search
from tuner.space.configuration import key_of
from tuner.study.search_worker import run_search
from tuner.study.shared_storage.storage import DRIVERS

ROOT = Path(__file__).parents[3]
TRIALS = 8


def start(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.samples.formula_study", str(folder), *words], cwd=ROOT
    )


def launches(folder, what="begin"):
    lines = (folder.parent / "launches.log").read_text().splitlines()
    return [line.split() for line in lines if line.startswith(what)]


def resume(folder):
    """Run the rest of the search in this process."""
    formula = FormulaServer()

    def evaluate(settings, setup, directory):
        outcome = formula(settings, setup, directory)
        with (folder.parent / "launches.log").open("a") as file:
            file.write(f"end {key_of(settings)}\n")
        return outcome

    run_search(open_search(folder, evaluate, trials=TRIALS, storage="journal", sampler="tpe"))


def results(folder, trials=TRIALS):
    return open_search(folder, FormulaServer(), trials=trials, sampler="tpe").results()


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=() if step == "measuring" else pytest.mark.slow) for step in STEPS]
)
def test_tuning_3_a_search_killed_at_a_step_completes_with_the_right_count(tmp_path, step):
    folder = tmp_path / "s"
    assert start(folder, "--kill-at", step).wait() == -9

    resume(folder)

    assert len(results(folder)) == TRIALS
    ended = [key for _, key, *_ in launches(folder, "end")]
    assert len(ended) == len(set(ended)) == TRIALS


def two_workers(folder, storage="journal", trials=10):
    """A leader and a worker on one study; returns both exit codes."""
    words = ["--storage", storage, "--trials", str(trials), "--pause-s", "0.05"]
    first = start(folder, *words, "--meet")
    while not (folder / "study.json").exists():
        time.sleep(0.05)
    second = start(folder, *words, "--worker")
    return first.wait(), second.wait()


def overlapping(folder):
    """Configurations that two processes measured at once."""
    spans = {}
    for word, key, pid, at in (*launches(folder), *launches(folder, "end")):
        spans.setdefault((key, pid), {})[word] = float(at)
    found = []
    for (key, pid), span in spans.items():
        others = [each for (other, other_pid), each in spans.items() if other == key and other_pid != pid]
        found += [key for each in others if each["begin"] < span["end"] and span["begin"] < each["end"]]
    return found


@pytest.mark.slow
def test_tuning_4_two_workers_on_one_journal_share_the_budget(tmp_path):
    folder = tmp_path / "s"

    assert two_workers(folder) == (0, 0)

    found = results(folder, 10)
    assert len(launches(folder)) == len(found) == 10
    assert len({pid for _, _, pid, _ in launches(folder)}) == 2
    assert overlapping(folder) == []
    assert [json.loads(path.read_text())["number"] for path in sorted(folder.glob("trials/*/result.json"))] == [
        each.number for each in found
    ]


@contextlib.contextmanager
def postgres(folder):
    """A PostgreSQL server on a free loopback port, started for the test; its URL."""
    binaries = Path(shutil.which("postgres")).resolve().parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"
    # PostgreSQL refuses to run as root.
    user = unprivileged()
    data.mkdir()
    if user is not None:
        for parent in (data, folder):
            os.chown(parent, pwd.getpwnam(user).pw_uid, -1)
        for parent in folder.parents:
            with contextlib.suppress(PermissionError):
                if parent.stat().st_uid == 0 and str(parent).startswith(("/tmp/pytest", "/tmp/py")):
                    parent.chmod(0o755)
    how = {"user": user, "group": pwd.getpwnam(user).pw_gid} if user is not None else {}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    made = subprocess.run(
        [binaries / "initdb", "-D", data, "-A", "trust", "-U", "tuner", "--no-sync"], check=False, **quiet, **how
    )
    assert made.returncode == 0
    server = subprocess.Popen(
        [binaries / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", "", "-F"], **quiet, **how
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
                break
            time.sleep(0.05)
        yield f"postgresql://tuner@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait()


def unprivileged():
    if os.getuid() != 0:
        return None
    names = {each.pw_name for each in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("postgres") is None, reason="postgres is not on the path")
def test_tuning_4_two_workers_on_one_postgresql_share_the_budget(tmp_path):
    if not any(importable(name) for name in DRIVERS["postgresql"]):
        pytest.skip(f"no driver for PostgreSQL is installed: {', '.join(DRIVERS['postgresql'])}")
    folder = tmp_path / "s"
    (tmp_path / "db").mkdir()

    with postgres(tmp_path / "db") as url:
        assert two_workers(folder, url) == (0, 0)

    assert len(launches(folder)) == 10
    assert len({pid for _, _, pid, _ in launches(folder)}) == 2
    assert overlapping(folder) == []


def importable(name):
    import importlib.util

    return importlib.util.find_spec(name) is not None


@pytest.mark.slow
def test_two_workers_on_sqlite_share_the_budget(tmp_path):
    folder = tmp_path / "s"

    assert two_workers(folder, f"sqlite:{tmp_path}/studies.db", trials=6) == (0, 0)

    assert len(launches(folder)) == 6
    assert overlapping(folder) == []
