"""A hub token and an API key reach only the processes that use them, and no log, page, file or command line."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.servers.launched_server import Server, environment_of, serve

KEY, TOKEN = "planted-key-7f3a", "hf_plantedtoken9c1e"
SECRETS = (KEY, TOKEN)
ROOT = Path(__file__).parents[2]
# The secrets in the environment of each process below the launcher, besides the model server.
CHILDREN = {
    "text-generation-router": [KEY, TOKEN],
    "template_worker": [],
    "grammars.worker": [],
    "guardian": [],
}


def descendants(pid: int) -> list[int]:
    """All descendants of the process `pid`."""
    with contextlib.suppress(FileNotFoundError):
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [each for child in map(int, listed) for each in (child, *descendants(child))]
    return []


def command_line(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    return ""


def fetch(server: Server, path: str) -> str:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=20) as response:
        return str(response.read().decode())


def secrets_in(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "model_server"),
    [
        ("tests.support.servers.scripted_launch", "stub_server.py"),
        ("reference_server.launcher.cli", "text-generation-server"),
    ],
)
def test_reliability_T55_T62_server_load_and_report_show_no_secret(
    program: str, model_server: str, tmp_path: Path
) -> None:
    environ = {"HF_TOKEN": TOKEN, "LOG_LEVEL": "debug", "PYTHONPATH": str(ROOT), "STUB_LOG": str(tmp_path / "events")}
    children = CHILDREN | {model_server: [TOKEN]}
    out = tmp_path / "run"
    words = ["-m", "loadgen.cli", "run", "--api-key", KEY, "--concurrency", "2", "--requests", "30"]
    words += ["--input-tokens", "8", "--output-tokens", "4", "--out", str(out)]

    with serve("--api-key", KEY, program=program, **environ) as server:
        bench = subprocess.Popen(
            [sys.executable, *words, "--url", server.url],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ) | {"HF_TOKEN": TOKEN},
        )  # fmt: skip
        typed = command_line(bench.pid)
        lines = {}
        while bench.poll() is None:
            lines |= {pid: command_line(pid) for pid in descendants(bench.pid)}
            with contextlib.suppress(subprocess.TimeoutExpired):
                bench.wait(0.2)
        spoken = bench.communicate()[0]
        pages = {path: fetch(server, path) for path in ("/info", "/config", "/metrics", "/v1/models")}
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.get("/config")
        started = descendants(server.process.pid)
        lines |= {pid: command_line(pid) for pid in started}
        environs = {command_line(pid): secrets_in(str(environment_of(pid))) for pid in started}
        log = server.output

    # Not its exit code: so short a run is written and reported, but no valid measurement.
    assert "failed           0" in spoken
    assert {path: secrets_in(text) for path, text in pages.items() if secrets_in(text)} == {}
    assert json.loads(pages["/config"])["api_key"]["value"] == "***"
    # A child that is between fork and exec still shows the command line that the user typed.
    assert [line for line in lines.values() if secrets_in(line) and line != typed] == []
    assert secrets_in(log) == []
    assert secrets_in(spoken) == []
    assert secrets_in(refused.value.read().decode()) == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"manifest.json", "report.html", "requests.parquet"} <= {path.name for path in files}
    assert [path for path in files if any(secret.encode() in path.read_bytes() for secret in SECRETS)] == []
    # The key is for whom clients talk to, the token for those who ask the hub.
    held = {name: [secret for line, own in environs.items() if name in line for secret in own] for name in children}
    assert held == children
    assert len(environs) == len(children)
