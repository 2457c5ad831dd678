"""`tgi-tune storage`: a database for workers on other machines."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from optuna.storages import GrpcStorageProxy

from tests.support.servers.ports import free_port
from tests.tuner.study.test_optuna_study import SPACE, result
from tuner.cli import main
from tuner.errors import StudyError
from tuner.study.optuna_study import OptunaStudy
from tuner.study.samplers import without_experimental_warnings
from tuner.study.shared_storage import storage_proxy
from tuner.study.shared_storage.storage import open_storage
from tuner.study.shared_storage.storage_proxy import make_server
from tuner.study.shared_storage.token import TOKEN_VARIABLE, new_token


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage") / "studies.db"


@pytest.fixture
def served(database: Path) -> Iterator[str]:
    """The address of a proxy of this process; its token is in the environment."""
    port, token = free_port(), new_token()
    server = make_server(open_storage(f"sqlite:{database}", Path()), "127.0.0.1", port, token)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, token)
        yield f"grpc://127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def served_by_command(database: Path) -> Iterator[str]:
    """As `served`, by a process of the command. The token is the one that it prints."""
    words = [sys.executable, "-m", "tuner.cli", "storage", f"sqlite:{database}", "--port", str(free_port())]
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            token = re.search(rf"{TOKEN_VARIABLE}=(\S{{32}}) ", line)
            assert token is not None
            patch.setenv(TOKEN_VARIABLE, token[1])
            yield line.rpartition(" ")[2].strip()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 143


@pytest.mark.slow
def test_two_workers_on_one_proxy_share_trials(served_by_command: str, database: Path, tmp_path: Path):
    one, other = (OptunaStudy(tmp_path / name, seed=0, storage=served_by_command, name="shared") for name in ("a", "b"))

    asked = [worker.ask() for worker in (one, other, one)]
    for worker, trial in zip((one, other, one), asked, strict=True):
        worker.tell(trial, result(trial.number, 5.0, SPACE.suggest(trial, {})))

    assert [trial.number for trial in asked] == [0, 1, 2]
    assert [each.number for each in other.results()] == [0, 1, 2]
    assert database.exists()


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("another", "refused this process: wrong token: set TGI_TUNE_STORAGE_TOKEN"),
        pytest.param("", "needs a token: set TGI_TUNE", marks=pytest.mark.slow),
    ],
)
def test_hardening_S1_a_proxy_refuses_clients_without_its_token(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, message: str
):
    monkeypatch.setenv(TOKEN_VARIABLE, token)

    with pytest.raises(StudyError, match=message):
        OptunaStudy(tmp_path, seed=0, storage=served, name="shared")


def test_hardening_S1_a_proxy_refuses_optunas_own_client(served: str):
    with without_experimental_warnings():
        client = GrpcStorageProxy(host="127.0.0.1", port=int(served.rpartition(":")[2]))

    with pytest.raises(grpc.RpcError, match="wrong token"):
        client.get_all_studies()


@pytest.mark.parametrize(("given", "printed"), [("", rf"{TOKEN_VARIABLE}=\S{{32}} "), ("known-token", "")])
def test_hardening_S1_only_a_new_token_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, printed: str
):
    tokens: list[str] = []

    def serve(_storage: object, _host: str, _port: int, token: str, on_ready: Callable[[], None]) -> None:
        tokens.append(token)
        on_ready()

    monkeypatch.setattr(storage_proxy, "serve_storage", serve)
    monkeypatch.setenv(TOKEN_VARIABLE, given)

    code = main(["storage", f"sqlite:{tmp_path}/s.db", "--port", "13002"])

    [token], text = tokens, capsys.readouterr().out
    assert code == 0
    assert re.fullmatch(rf"serving sqlite:{tmp_path}/s.db: {printed}--storage grpc://127.0.0.1:13002\n", text)
    assert (token == given) if given else (f"={token} " in text)


@pytest.mark.parametrize("url", ["journal", "journal:/tmp/x.log", "grpc://127.0.0.1:1"])
def test_a_storage_that_no_proxy_serves_is_refused(url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["storage", url]) == 2
    assert f"the storage {url!r} cannot be served: use one of sqlite:" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = main(["storage", f"sqlite:{tmp_path}/s.db", "--port", str(port)])

    assert code != 0
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
