import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from loadgen import cli, program
from reports.reference.file_keys import MANIFEST_KEYS, SUMMARY_KEYS
from reports.reference.files_page import TABLES
from reports.saved_run import load_run
from tests.support import measured_requests
from tests.support.servers.stream_server import Script, ServerState, stream_server

LOAD = ["--concurrency", "2", "--requests", "40", "--input-tokens", "8", "--output-tokens", "2"]


@pytest.fixture(autouse=True)
def signal_handlers(monkeypatch):
    """`main` is called in the test process: leave its handlers alone."""
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


@pytest.fixture(scope="module")
def url():
    with stream_server(ServerState(script=lambda body: Script(first_s=0.005, gap_s=0.02))) as (url, _):
        yield url


@pytest.fixture(scope="module")
def measured(url, tmp_path_factory):
    """One run, its exit code, and what it printed."""
    out = tmp_path_factory.mktemp("measured") / "r"
    arguments = ["run", "--url", url, *LOAD, "--out", str(out), "--label", "mine"]
    printed, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(errors):
        patch.setattr(program, "raise_on_signals", lambda: None)
        code = cli.main(arguments)
    return SimpleNamespace(out=out, code=code, stdout=printed.getvalue(), stderr=errors.getvalue(), arguments=arguments)


@pytest.fixture
def copied(measured, tmp_path):
    """A run directory of one's own."""
    return Path(shutil.copytree(measured.out, tmp_path / "copied"))


def expected_code(out):
    """4 for an invalid run, which is possible on a busy machine; otherwise 0."""
    status = json.loads((out / "summary.json").read_text())["verdict"]["status"]
    return 4 if status == "invalid" else 0


def test_run_writes_a_run_directory_with_its_report_and_prints_the_table(measured, url):
    files = {path.name for path in measured.out.iterdir()}
    assert measured.code == expected_code(measured.out)
    assert {"manifest.json", "summary.json", "requests.parquet", "report.html", "report.md", "client.json"} <= files
    assert not {name for name in files if name.endswith((".jsonl", ".part"))}
    assert "TTFT" in measured.stdout
    assert "40 started in the window" in measured.stdout
    assert f"report: {measured.out / 'report.html'}" in measured.stderr
    manifest = json.loads((measured.out / "manifest.json").read_text())
    assert manifest["label"] == "mine"
    assert manifest["command"] == ["tgi-bench", *measured.arguments]


def undocumented(content, keys):
    """Keys of nested JSON objects that the reference lacks. keys: as tuples; a part in capitals stands for any name."""
    for name, value in content.items():
        found = [key[1:] for key in keys if key and (key[0] == name or key[0].isupper())]
        below = [key for key in found if key]
        if not found or (not isinstance(value, dict) and () not in found):
            yield name
        elif isinstance(value, dict) and below:
            yield from (f"{name}.{each}" for each in undocumented(value, below))


def has(content, key):
    """Whether the objects have a key of the reference."""
    if not key:
        return True
    names = content if isinstance(content, dict) else {}
    return any(has(names[name], key[1:]) for name in names if key[0] == name or key[0].isupper())


def test_docs_files_has_every_key_of_a_real_run_and_no_other(measured):
    summary, manifest = (json.loads((measured.out / f"{name}.json").read_text()) for name in ("summary", "manifest"))
    keys = {key: tuple(key.split(".")) for key in SUMMARY_KEYS}

    assert list(undocumented(summary, keys.values())) == []
    absent = {key for key, parts in keys.items() if not has(summary, parts)}
    assert absent == {
        *(key for key in keys if key.startswith(("overload.", "abandoned."))),
        "slo.first_violated.OBJECTIVE",
    }
    assert sorted(manifest) == sorted(MANIFEST_KEYS)


@pytest.mark.parametrize(("table", "columns"), TABLES, ids=[table for table, _ in TABLES])
def test_docs_files_has_every_column_of_a_real_run_and_no_other(measured, table, columns):
    assert sorted(pq.read_schema(measured.out / f"{table}.parquet").names) == sorted(columns)


def test_an_invalid_run_exits_4_and_keeps_its_data(tmp_path, capsys):
    with stream_server(ServerState(lambda body: Script(status=500))) as (url, _):
        code = cli.main(["run", "--url", url, *LOAD, "--requests", "5", "--out", str(tmp_path / "r")])

    assert code == 4
    assert len(measured_requests.measured(load_run(tmp_path / "r"))) == 5
    assert "invalid" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_command_is_started_measured_and_stopped(tmp_path, capsys):
    command = f"{sys.executable} -m tests.support.servers.serve_stream"

    code = cli.main(["run", "--server", command, *LOAD, "--out", str(tmp_path / "r")])

    result = load_run(tmp_path / "r")
    assert code == expected_code(tmp_path / "r")
    assert result.manifest.target["launch_argv"][1:] == ["-m", "tests.support.servers.serve_stream"]
    assert {record.status for record in measured_requests.measured(result)} == {"ok"}
    assert (tmp_path / "r" / "server.log").exists()
    assert result.manifest.target["server_exit_code"] is None


def test_a_server_that_fails_to_start_exits_4_with_its_log(tmp_path, capsys):
    command = f"{sys.executable} -m tests.support.servers.serve_stream --fail"

    code = cli.main(["run", "--server", command, "--out", str(tmp_path / "r")])

    assert code == 4
    assert "no memory left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--rate", "3"], "`rate` is 3.0 but mode 'closed' has no rate"),
        (["run", "--workers", "9"], "`concurrency` is 8 but 9 workers share it"),
        (["compare", "runs"], "a comparison needs two sides"),
        (["selftest", "--streams", "one"], "`streams` is 'one', not a list of numbers"),
        (["run", "--web", "here:now"], "`web` is 'here:now', not HOST or HOST:PORT"),
        (
            ["run", "--join", "10.0.0.1", "--rate", "3"],
            "--rate does not go with --join; give it to the master",
        ),
        (["run", "--master", "--workers", "2"], "`workers` is 2 but a --master makes no load; use --expect-workers"),
        (["run", "--expect-workers", "2"], "`expect_workers` needs --master"),
        (["noise", "somewhere"], "'somewhere' is not a side of a comparison"),
        (
            ["run", "--slo", "ttft_p95_ms > 500"],
            "`slo` is 'ttft_p95_ms > 500', but a lower ttft_p95_ms is better; write 'ttft_p95_ms < 500'",
        ),
        (["run", "--slo", "output_tokens_per_s > 5"], "`slo` names 'output_tokens_per_s', which is not a metric of a"),
        (["report", "no-such-directory"], "no-such-directory: no such directory"),
        (["run", "--config", "absent.toml"], "absent.toml: No such file"),
    ],
)
def test_wrong_usage_exits_2_with_the_reason(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)

    code = cli.main(arguments)

    assert code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_the_command_and_the_load(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    code = cli.main(["run", "--dry-run", "--server", "serve --port {port}", "--rate", "3", "--mode", "poisson"])

    plan = json.loads(capsys.readouterr().out)
    assert code == 0
    assert plan["server"] == ["serve", "--port", "{port}"]
    assert (plan["load"]["rate"], plan["load"]["duration"], plan["load"]["input_tokens"]) == (3.0, 30.0, "128")
    assert not list(tmp_path.iterdir())


def test_an_unreachable_url_exits_4_and_leaves_nothing(tmp_path, capsys):
    code = cli.main(["run", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "r")])

    assert code == 4
    assert "http://127.0.0.1:9/info: connection refused" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_an_unknown_flag_exits_2(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "--concurency", "3"])

    assert left.value.code == 2
    assert "--concurency" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["report", "--help"]])
def test_help_prints_the_exit_codes(capsys, arguments):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)

    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert "130, 143  interrupted" in shown


def test_report_finishes_a_run_whose_process_died_and_prints_only_json_with_json(copied, capsys):
    records = load_run(copied).records
    (copied / "requests.parquet").unlink()
    (copied / "report.html").unlink()
    lines = [json.dumps(record.to_json()) for record in records[:30]]
    (copied / "requests.jsonl").write_text("\n".join(lines) + '\n{"run_id": "cut off')

    code = cli.main(["report", str(copied), "--json"])

    assert code == 0
    assert json.loads(capsys.readouterr().out) == json.loads((copied / "summary.json").read_text())
    assert (copied / "report.html").exists()
    assert len(load_run(copied).records) == 30
    assert not (copied / "requests.jsonl").exists()


def test_several_runs_are_reported_side_by_side(measured, copied, tmp_path, capsys):
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps(manifest | {"label": "two"}))

    code = cli.main(["report", str(measured.out), str(copied), "--out", str(tmp_path / "both")])

    shown = capsys.readouterr().out
    assert code == 0
    assert "mine: " in shown
    assert "two: " in shown
    assert (tmp_path / "both" / "report.md").exists()


def test_importing_the_commands_loads_neither_locust_nor_the_libraries_of_reports():
    code = (
        "import sys, loadgen.cli, loadgen.commands.run\n"
        "libraries = {'numpy', 'pandas', 'scipy', 'matplotlib'}\n"
        "loaded = {'locust', 'gevent', 'torch', 'reference_server', *libraries} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
