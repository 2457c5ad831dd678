"""The origin of the compiled kernels: one build for any number of processes, and none without a compiler."""

import logging
import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reference_server.model_server.cpu_kernels import build

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo fake 1; exit; fi
echo started >> {log}
while [ "$1" != -o ]; do shift; done
sleep {seconds}
echo library > "$2"
"""
BUILD = "import sys; from reference_server.model_server.cpu_kernels import build; from pathlib import Path; \
print(build.build(Path(sys.argv[1])))"


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes its time; returns the log of its runs."""
    log = tmp_path / "log"
    place_compiler(tmp_path / "bin", FAKE_COMPILER.format(log=log, seconds=0.5))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(build, "COMPILERS", ("c++",))
    return log


def place_compiler(directory: Path, script: str) -> None:
    directory.mkdir(exist_ok=True)
    compiler = directory / "c++"
    compiler.write_text(script)
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)


def test_only_one_of_two_processes_builds(tmp_path: Path, fake_compiler: Path) -> None:
    """Two threads stand for the processes: each opens the file of the lock, and the lock belongs to the open file."""
    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(build.build, [tmp_path / "cache"] * 2))

    assert libraries[0] == libraries[1]
    assert libraries[0].read_text() == "library\n"
    # One run for each source, and one that links.
    assert fake_compiler.read_text() == "started\n" * (len(build.SOURCES) + 1)


@pytest.mark.slow
def test_a_killed_build_leaves_no_library_and_no_lock(tmp_path: Path, fake_compiler: Path) -> None:
    cache = tmp_path / "cache"
    place_compiler(tmp_path / "bin", FAKE_COMPILER.format(log=fake_compiler, seconds=3600))
    killed = subprocess.Popen([sys.executable, "-c", BUILD, str(cache)], start_new_session=True)
    while not fake_compiler.is_file():
        assert killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not list(cache.glob("*.so"))

    place_compiler(tmp_path / "bin", FAKE_COMPILER.format(log=fake_compiler, seconds=0))
    assert build.build(cache).read_text() == "library\n"


@pytest.mark.parametrize("planted", ["writable", "link"])
def test_hardening_S2_no_kernels_are_read_from_a_folder_that_others_control(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / ".cache" / "tgi-bench" / "kernels"
    assert build.cache_directory() == folder
    folder.rmdir()
    if planted == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)

    own = build.cache_directory()

    assert own.parent == tmp_path
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert "other users can write" in caplog.text


def test_without_a_compiler_the_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    build.kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert build.kernels() is None
            assert build.kernels() is None
    finally:
        build.kernels.cache_clear()

    assert caplog.messages == ["the compiled CPU kernels are not used: no C++ compiler found (no-such-compiler)"]


def test_the_error_of_a_failing_compiler_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place_compiler(
        tmp_path / "bin", '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: no" >&2\nexit 1\n'
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(build, "cache_directory", lambda: tmp_path / "cache")
    build.kernels.cache_clear()
    try:
        assert build.kernels() is None
    finally:
        build.kernels.cache_clear()

    assert caplog.messages == ["the compiled CPU kernels are not used: the compiler failed: x.cpp:1: error: no"]
    assert not list((tmp_path / "cache").glob("*.so"))
