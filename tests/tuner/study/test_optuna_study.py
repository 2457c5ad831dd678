import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from tuner.config import ParamSection
from tuner.space.search_space import SearchSpace
from tuner.study.optuna_study import RESULT, OptunaStudy, is_alive, started_at
from tuner.study.shared_storage.storage import open_storage
from tuner.study.shared_storage.storage_proxy import make_server
from tuner.study.shared_storage.token import TOKEN_VARIABLE
from tuner.trial.outcome import TrialResult

SPACE = SearchSpace.of(
    {
        "max_batch_prefill_tokens": ParamSection(type="int", low=64, high=4096, log=True, multiple_of=64),
        "prefill_chunking": ParamSection(type="bool"),
        "max_waiting_tokens": ParamSection(type="int", low=1, high=100, log=True, when="not prefill_chunking"),
        "cuda_memory_fraction": ParamSection(type="float", low=0.5, high=1.0, step=0.01),
    },
    [],
    frozenset({"max_batch_prefill_tokens", "prefill_chunking", "max_waiting_tokens", "cuda_memory_fraction"}),
)


def result(number, value, settings=None):
    violations = {"ttft_p95_ms <= 9": -0.5 if value else 1.0}
    outcome = "measured" if value else "infeasible"
    return TrialResult(number, settings or {}, outcome, value=value, violations=violations)


@pytest.mark.parametrize("leave", [OptunaStudy.redo, OptunaStudy.give_back])
def test_settings_that_are_enqueued_again_keep_the_attributes_of_their_proposal(leave, tmp_path):
    study = OptunaStudy(tmp_path, seed=1)
    settings = {"max_batch_prefill_tokens": 512, "prefill_chunking": True, "cuda_memory_fraction": 0.9}
    study.enqueue(SPACE, settings, {"by_simulator": True, "predicted_output_tokens_per_s": 900.0})
    trial = study.ask()
    SPACE.suggest(trial, {})

    leave(study, trial)
    again = study.ask()

    assert SPACE.suggest(again, {}) == settings
    assert again.user_attrs["by_simulator"]
    assert again.user_attrs["predicted_output_tokens_per_s"] == 900.0


def run(study, trials):
    for _ in range(trials):
        trial = study.ask()
        settings = SPACE.suggest(trial, {})
        value = None if settings["cuda_memory_fraction"] > 0.95 else float(settings["max_batch_prefill_tokens"])
        study.tell(trial, result(trial.number, value, settings))


def test_a_study_continues_where_it_was_left(tmp_path):
    run(OptunaStudy(tmp_path, seed=0), 3)

    assert [each.number for each in OptunaStudy(tmp_path, seed=0).results()] == [0, 1, 2]


def test_enqueued_settings_come_first(tmp_path):
    study = OptunaStudy(tmp_path, seed=0)
    study.enqueue(SPACE, {"max_batch_prefill_tokens": 4096, "prefill_chunking": True, "cuda_memory_fraction": 1.0})

    assert SPACE.suggest(study.ask(), {}) == {
        "max_batch_prefill_tokens": 4096,
        "prefill_chunking": True,
        "cuda_memory_fraction": 1.0,
    }


def test_enqueued_settings_outside_the_space_are_moved_into_it(tmp_path):
    study = OptunaStudy(tmp_path, seed=0)
    study.enqueue(SPACE, {"max_batch_prefill_tokens": 16, "prefill_chunking": False, "max_waiting_tokens": 500})

    settings = SPACE.suggest(study.ask(), {})

    assert settings["max_batch_prefill_tokens"] == 64
    assert settings["max_waiting_tokens"] == 100


def test_an_interrupted_trial_is_enqueued_again(tmp_path):
    interrupted = OptunaStudy(tmp_path, seed=0)
    first = interrupted.ask()
    left = SPACE.suggest(first, {})

    resumed = OptunaStudy(tmp_path, seed=0)
    for trial in (first,):
        resumed.redo(trial)

    assert SPACE.suggest(resumed.ask(), {}) == left
    assert resumed.results() == []


def test_a_fault_of_the_generator_does_not_count_as_a_configuration(tmp_path):
    study = OptunaStudy(tmp_path, seed=0)
    study.tell(study.ask(), TrialResult(0, {}, "failed", reason="disk full"))

    assert [each.was_launched for each in study.results()] == [False]


@pytest.mark.filterwarnings("error")
def test_the_sampler_avoids_infeasible_configurations(tmp_path):
    study = OptunaStudy(tmp_path, seed=1)
    run(study, 30)

    last = [SPACE.suggest(study.ask(), {}) for _ in range(8)]

    assert len(study.results()) == 30
    assert sum(settings["cuda_memory_fraction"] <= 0.95 for settings in last) >= 6


@contextlib.contextmanager
def proxied(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backing = open_storage(f"sqlite:{tmp_path}/proxied.db", tmp_path)
    server = make_server(backing, "127.0.0.1", port, "the-token")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("kind", ["journal", pytest.param("sqlite", marks=pytest.mark.slow), "grpc"])
def test_a_study_is_the_same_on_every_storage(tmp_path, kind, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "the-token")
    with contextlib.ExitStack() as stack:
        url = {"journal": "journal", "sqlite": f"sqlite:{tmp_path}/s.db"}.get(kind) or stack.enter_context(
            proxied(tmp_path)
        )
        run(OptunaStudy(tmp_path, seed=0, storage=url), 3)
        continued = OptunaStudy(tmp_path, seed=0, storage=url)
        trial = continued.ask()

        assert [each.number for each in continued.results()] == [0, 1, 2]
        assert continued.lost() == []
        assert not continued.is_taken(trial, "a")
        assert continued.is_taken(continued.ask(), "a")


def test_a_lease_ends_with_a_local_process_and_after_five_minutes_on_another_machine():
    here = {"host": socket.gethostname(), "pid": 2**22 + 1, "started": "1", "at": 0.0}
    elsewhere = {"host": "another", "pid": 1, "started": "1", "at": 1000.0}

    assert not is_alive(here)
    assert is_alive(elsewhere, now_s=1299.0)
    assert not is_alive(elsewhere, now_s=1301.0)
    assert not is_alive(None)


@pytest.mark.parametrize(
    "lease",
    [
        {},
        {"host": socket.gethostname()},
        {"host": "x", "at": "soon"},
        {"host": socket.gethostname(), "pid": "", "started": "1"},
    ],
)
def test_hardening_S1_a_malformed_lease_is_a_lost_worker(lease):
    assert not is_alive(lease)


def test_hardening_S1_a_malformed_result_is_ignored(tmp_path):
    study = OptunaStudy(tmp_path, seed=0)
    run(study, 1)
    for text in ("{", "[]", '{"number": "../../x", "settings": {}, "outcome": "measured"}',
                 '{"number": -1, "settings": {}, "outcome": "measured"}',
                 '{"number": 5, "settings": {}, "outcome": "measured", "run": "../../etc"}'):  # fmt: skip
        trial = study.ask()
        study.note(trial, RESULT, text)
        study.drop(trial)

    assert [each.number for each in study.results()] == [0]


def test_a_killed_process_is_not_alive_before_its_parent_collects_it():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        lease = {"host": socket.gethostname(), "pid": worker.pid, "started": started_at(worker.pid), "at": time.time()}
        was_alive = is_alive(lease)
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)

        assert (was_alive, is_alive(lease)) == (True, False)
