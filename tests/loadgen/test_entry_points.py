"""Dialects, workloads and profiles of an installed package: the example of docs/extending.md, and broken ones."""

import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.runner import measure
from loadgen.target.target import Target
from reports.run_schema import Phase, Status
from tests.support.servers.dialect_server import serve_http
from tuner.servers.find_profile import find_profile

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
PROFILE = """
name = "plain"
command = "plain --port {port} {model}"
[setting.slots]
flag = "--slots"
type = "int"
low = 1
high = 8
default = 4
help = "answers at once"
"""
BROKEN = "def no_dialect(sampling):\n    return sampling\n\ndef once(load):\n    return iter(())\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package of the page, and a broken one, for this process and its children."""
    toml, module = (
        re.search(f"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1) for kind in ("toml", "python")
    )
    entries = re.sub(r'project\.entry-points\."(\S+)"', r"\1", toml).replace('"', "")
    install(tmp_path, "bench-plain", entries)
    (tmp_path / "bench_plain.py").write_text(module)
    (tmp_path / "plain.toml").write_text(PROFILE)
    install(
        tmp_path,
        "bench-broken",
        "[tgi_bench.dialects]\nabsent = bench_absent:Absent\nempty = bench_broken:no_dialect\n"
        "[tgi_bench.workloads]\nonce = bench_broken:once\n",
    )
    (tmp_path / "bench_broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def install(folder, name, entries):
    information = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(entries)


class Handler(BaseHTTPRequestHandler):
    """The server of the example: a word a line."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self._send(404, b"{}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        lines = [{"word": f" {number}"} for number in range(body["limit"])]
        lines.append({"words": body["limit"], "prompt_words": len(body["text"].split())})
        self._send(200, b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def _send(self, status, body):
        self.send_response(status)
        is_stream = "ndjson" in self.headers.get("accept", "")
        self.send_header("content-type", "application/x-ndjson" if is_stream else "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.usefixtures("installed")
def test_the_example_of_the_page_is_installed_and_measures_a_server(tmp_path):
    load = BenchConfig(
        api="plain", workload="questions", requests=3, concurrency=1, input_tokens="16", output_tokens="4", model="m"
    )
    with serve_http(Handler) as url:
        result = measure(load, Target(url), tmp_path / "r")

    records = [each for each in result.records if each.phase == Phase.MEASURE]
    assert [(each.status, each.input_tokens, each.output_tokens) for each in records] == [(Status.OK, 16, 4)] * 3
    assert result.manifest.target["api"] == "plain"
    assert find_profile("plain").defaults == {"slots": 4}


@pytest.mark.usefixtures("installed")
def test_help_lists_the_names_of_installed_packages(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])

    text = "".join(capsys.readouterr().out.split())
    assert {name for name in ("plain", "questions", "absent", "once", "anthropic") if name in text} == {
        *("plain", "questions", "absent", "once", "anthropic")
    }


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"api": "absent"}, r"`absent` of package bench-broken \(entry point bench_absent:Absent .* No module named"),
        ({"api": "empty"}, r"`empty` of package bench-broken .*: its Sampling has no `sampling`"),
        ({"api": "plain", "workload": "once"}, r"`once` of package bench-broken .* iterated more than once"),
    ],
)
def test_a_broken_entry_point_is_named(tmp_path, load, message):
    with serve_http(Handler) as url, pytest.raises(UsageError, match=message):
        measure(BenchConfig(**load, requests=1, model="m"), Target(url), tmp_path / "r")


@pytest.mark.usefixtures("installed")
def test_a_name_that_no_package_has_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"must be one of auto, tgi, .*, absent, empty, plain"):
        BenchConfig(api="plane")


@pytest.mark.usefixtures("installed")
def test_broken_entry_points_do_not_break_other_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert main(["run", "--url", "http://127.0.0.1:1", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["load"]["api"] == "auto"
