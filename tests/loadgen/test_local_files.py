"""Folders and files of a command: their modes, links and leftovers; and messages about missing files or packages."""

import http.server
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen import cli, program
from loadgen.errors import TargetError, UsageError
from loadgen.program import disk_full
from loadgen.run_directory import make_run_directory
from loadgen.target.launched.launch import remove_stale_folders
from loadgen.target.target import Target
from tuner.errors import StudyError
from tuner.study.study_folder import StudyFolder

ROOT = Path(__file__).parents[2]
# grpc is not importable, as in a base install.
BASE_INSTALL = "import sys; sys.modules['grpc'] = None; from {module} import {name}; sys.exit({name}({arguments}))"


@pytest.fixture(autouse=True)
def signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


def test_hardening_S7_runs_and_studies_are_for_their_user_alone(tmp_path: Path):
    make_run_directory(tmp_path / "runs" / "r")
    StudyFolder(tmp_path / "studies" / "s").claim({"space": "s", "load": "l", "build": "b", "device": "d"})

    for folder in ("runs/r", "studies/s"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700


def test_hardening_S7_runs_and_studies_do_not_write_through_links(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for folder, name in (("run", "requests-0.jsonl"), ("study", "run.lock")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).symlink_to(victim)

    with pytest.raises(UsageError, match=r"contains links \(requests-0.jsonl\)"):
        make_run_directory(tmp_path / "run")
    with pytest.raises(StudyError, match=r"contains links \(run.lock\)"), StudyFolder(tmp_path / "study").lock():
        pass

    assert victim.read_text() == "precious"


def test_hardening_S7_socket_folders_of_killed_processes_are_removed(tmp_path: Path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = (f"tgi-{gone.pid}-a", f"tgi-{os.getpid()}-b", "tgi-bench-kernels-c", "tgi-x")
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / f"tgi-{gone.pid}-link").symlink_to(tmp_path / "tgi-x")

    remove_stale_folders(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], f"tgi-{gone.pid}-link"}


def test_hardening_S7_a_closed_stdout_is_no_traceback():
    command = [sys.executable, "-m", "loadgen.cli", "run", "--dry-run", "--url", "http://127.0.0.1:1"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    assert done.returncode == 141
    assert done.stderr == ""


class ClosesAtOnce(http.server.BaseHTTPRequestHandler):
    """A server that is no TGI: HTTP/1.0, so that every answer ends its connection."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


class AnswersNested(ClosesAtOnce):
    """Its /info is JSON of 200,000 levels."""

    def do_GET(self) -> None:
        if self.path != "/info":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[" * 200_000)


@pytest.fixture(params=[ClosesAtOnce])
def foreign_server(request: pytest.FixtureRequest) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), request.param) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_hardening_S7_a_server_that_is_no_tgi_is_named(foreign_server: str):
    with pytest.raises(TargetError, match="neither /info nor /v1/models answers as in TGI or OpenAI; give --api"):
        Target(foreign_server).facts()


@pytest.mark.parametrize("foreign_server", [AnswersNested], indirect=True)
def test_hardening_R26_a_nested_info_is_no_info(foreign_server: str):
    with pytest.raises(TargetError, match="neither /info nor"):
        Target(foreign_server).facts()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mode", "trace", "--workload", "mooncake", "--trace-file", "absent.jsonl"), "absent.jsonl"),
        (("--workload", "prompts", "--prompts-file", "absent.jsonl", "--output-tokens", "4"), "absent.jsonl"),
        (("--length-pairs", "absent.csv"), "absent.csv"),
        (("--tokenizer", "absent"), "`tokenizer` is 'absent': No such file or directory; give a tokenizer.json"),
        (("--structured", "1", "--schemas-file", "absent.jsonl"), "absent.jsonl"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        "run --server {start}",
        "sweep --server {start} --points 1,2",
        "search --server {start} --low 1 --high 2 --slo e2e_p95_ms<1000",
        "compare --server-a {start} --server-b {start}",
        "noise {named}",
    ],
    ids=lambda command: command.split()[0],
)
def test_hardening_S7_files_are_read_before_a_server_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, flags: tuple[str, ...], message: str
):
    started = tmp_path / "started"
    words = [word.format(start=f"touch {started}", named=f"command:touch {started}") for word in command.split(" ")]
    if words[0] in ("sweep", "search") and "--mode" in flags:
        pytest.skip("a trace has no load to vary")

    code = cli.main([*words, *flags, "--out", str(tmp_path / "r")])

    assert code == 2
    assert message in capsys.readouterr().err
    assert not started.exists()


def test_pages_2_output_files_are_checked_before_a_server_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    started, taken = tmp_path / "started", tmp_path / "file"
    taken.write_text("")
    sides = ("--server-a", f"touch {started}", "--server-b", f"touch {started}")

    code = cli.main(["compare", *sides, "--junit", str(taken / "gate.xml"), "--out", str(tmp_path / "r")])

    assert code == 2
    assert "gate.xml': " in (printed := capsys.readouterr().err)
    assert "; give a path in another folder" in printed
    assert not started.exists()


@pytest.mark.parametrize(
    ("module", "name", "arguments", "code"),
    [
        ("reference_server.entry_points", "launcher", "", 1),
        *(
            pytest.param("reference_server.entry_points", name, "", 1, marks=pytest.mark.slow)
            for name in ("router", "server", "benchmark")
        ),
        ("loadgen.cli", "main", "['run', '--duration', '1']", 2),
    ],
)
def test_hardening_S7_a_missing_extra_is_named(tmp_path: Path, module: str, name: str, arguments: str, code: int):
    script = BASE_INSTALL.format(module=module, name=name, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert done.returncode == code, done.stderr
    assert "pip install 'tgi-bench[server]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_hardening_S8_a_full_disk_is_named_with_its_free_bytes(tmp_path: Path):
    text = disk_full(tmp_path / "absent" / "requests.jsonl")

    assert text.startswith(f"the disk of {tmp_path}/absent/requests.jsonl is full: ")
    assert "bytes are free" in text
