"""Environments of clients: each is created once from an index; errors if no index can be reached."""

import contextlib
import functools
import http.server
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients import client_environments
from tests.support.clients.client_environments import IndexUnreachableError, InstallError, environment_for
from tests.support.servers.ports import free_port


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def index_of(directory: Path) -> Iterator[str]:
    """A package index on loopback; its url."""
    handler = functools.partial(_Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def use_index(monkeypatch: pytest.MonkeyPatch):
    """Configure pip with only this index."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return functools.partial(monkeypatch.setenv, "PIP_INDEX_URL")


def add_distribution(index: Path, name: str, version: str) -> None:
    """The smallest wheel that pip installs: it has only metadata."""
    directory = index / name
    directory.mkdir(parents=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_an_environment_is_made_once_and_knows_its_versions(tmp_path: Path, use_index):
    add_distribution(tmp_path / "index", "little", "1.2")

    with index_of(tmp_path / "index") as url:
        use_index(url)
        made = environment_for("client", ["little==1.2"], tmp_path / "kept")
    again = environment_for("client", ["little==1.2"], tmp_path / "kept")

    assert made == again
    assert made.python.is_file()
    assert made.version_of("little") == "1.2"
    with pytest.raises(client_environments.metadata.PackageNotFoundError):
        made.version_of("pytest")


@pytest.mark.slow
def test_a_missing_index_is_reported_by_name_and_leaves_no_unfinished_environment(tmp_path: Path, use_index):
    url = f"http://127.0.0.1:{free_port()}/"
    use_index(url)

    for _ in range(2):
        with pytest.raises(IndexUnreachableError, match=f"Could not fetch URL {url}little/"):
            environment_for("client", ["little==1.2"], tmp_path)


@pytest.mark.slow
def test_an_index_without_the_version_is_a_failure_and_no_reason_to_skip(tmp_path: Path, use_index):
    add_distribution(tmp_path / "index", "little", "1.2")

    with index_of(tmp_path / "index") as url:
        use_index(url)
        with pytest.raises(InstallError, match=r"little==1\.3"):
            environment_for("client", ["little==1.3"], tmp_path / "kept")
        with pytest.raises(InstallError, match="absent"):
            environment_for("client", ["absent==1.0"], tmp_path / "kept")
