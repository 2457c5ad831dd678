"""A study in optuna-dashboard: its copy, and the dashboard's own API over it, in an environment of its own."""

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tests.support.clients.client_environments import IndexUnreachableError, environment_for
from tests.support.servers.ports import free_port
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace
from tuner.study.dashboard_copy import ARTIFACTS, STORAGE_FILE, write_dashboard_copy
from tuner.trial.objective import Limit, Objective
from tuner.trial.outcome import TrialResult

REQUIREMENTS = ("optuna-dashboard==0.21.0", f"optuna=={optuna.__version__}")
SPACE = SearchSpace((
    Parameter("max_batch_prefill_tokens", "int", low=256, high=8192, log=True),
    Parameter("prefill_chunking", "bool"),
))  # fmt: skip
LIMIT = Limit("ttft_p95_ms", 500.0, None)
OBJECTIVE = Objective("output_tokens_per_s", (LIMIT,))


def result(number: int, value: float | None, ttft_ms: float, **changes: Any) -> TrialResult:
    settings = {"max_batch_prefill_tokens": 512 * (number + 1), "prefill_chunking": number % 2 == 0, "model_id": "m"}
    return TrialResult(
        number,
        settings,
        "measured",
        value,
        {"output_tokens_per_s": value, "ttft_p95_ms": ttft_ms},
        {str(LIMIT): LIMIT.violation(ttft_ms)},
        **{"started": 1.8e9, "seconds": 20.0, **changes},
    )


RESULTS = [
    result(0, 1500.0, 120.0, origin="baseline"),
    result(1, 1725.5, 130.0),
    result(2, 1900.0, 650.0),
    TrialResult(3, {"max_batch_prefill_tokens": 8192}, "infeasible", cause="memory", reason="no memory for the cache"),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "nightly"
    folder.mkdir()
    (folder / "report.html").write_text("<html>the report</html>")
    return write_dashboard_copy(folder, OBJECTIVE, SPACE, RESULTS, {"sentence": "Set prefill_chunking."})


def test_the_copy_has_named_values_in_their_own_unit_and_readable_attributes(copy: Path):
    storage = JournalStorage(JournalFileBackend(str(copy / STORAGE_FILE)))
    study = optuna.load_study(study_name="nightly", storage=storage)

    assert study.metric_names == ["Output tokens/s"]
    assert [trial.values for trial in study.trials] == [[1500.0], [1725.5], [1900.0], None]
    assert study.best_trial.number == 1
    assert study.trials[1].params == {"max_batch_prefill_tokens": 1024.0, "prefill_chunking": False}
    assert study.trials[2].user_attrs["outcome"] == "misses a limit"
    assert study.trials[2].user_attrs["TTFT p95, ms"] == 650.0
    assert study.trials[3].user_attrs["reason"] == "no memory for the cache"
    assert study.trials[1].user_attrs["setting model_id"] == "m"
    assert study.user_attrs == {"sentence": "Set prefill_chunking."}


def test_a_second_copy_replaces_the_first(copy: Path):
    again = write_dashboard_copy(copy.parent, OBJECTIVE, SPACE, RESULTS[:2], {})

    storage = JournalStorage(JournalFileBackend(str(again / STORAGE_FILE)))
    assert len(optuna.load_study(study_name="nightly", storage=storage).trials) == 2


@contextlib.contextmanager
def dashboard(copy: Path) -> Iterator[str]:
    """The dashboard as `tgi-tune dashboard` starts it; yields its URL."""
    try:
        environment = environment_for("optuna-dashboard", REQUIREMENTS)
    except IndexUnreachableError as error:
        pytest.skip(str(error))
    port = free_port()
    command = [environment.directory / "bin" / "optuna-dashboard", copy / STORAGE_FILE, "--artifact-dir"]
    command += [copy / ARTIFACTS, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError):
                    read(f"http://127.0.0.1:{port}/api/studies")
                    break
                assert process.poll() is None, "the dashboard has ended"
                assert time.monotonic() < deadline_s, "the dashboard does not answer"
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        content: bytes = response.read()
    return content


@pytest.mark.slow
def test_the_dashboard_lists_the_study_with_its_metric_its_trials_and_its_report(copy: Path):
    with dashboard(copy) as url:
        (summary,) = json.loads(read(f"{url}/api/studies"))["study_summaries"]
        study_id = summary["study_id"]
        study = json.loads(read(f"{url}/api/studies/{study_id}"))
        (artifact,) = study["artifacts"]
        report = read(f"{url}/artifacts/{study_id}/{artifact['artifact_id']}")

    assert summary["study_name"] == "nightly"
    assert study["directions"] == ["maximize"]
    assert study["objective_names"] == ["Output tokens/s"]
    assert [trial["values"] for trial in study["trials"] if trial["state"] == "Complete"] == [
        [1500.0],
        [1725.5],
        [1900.0],
    ]
    attributes = {each["key"]: each["value"] for each in study["trials"][2]["user_attrs"]}
    assert attributes["outcome"] == "misses a limit"
    assert (artifact["filename"], report) == ("report.html", b"<html>the report</html>")
