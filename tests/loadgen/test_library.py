"""The Python API: runs from a process with an event loop, with the checks of the commands and without output."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

import loadgen
import tuner
from loadgen.call_words import words_of
from tests.support.servers.stream_server import Script, ServerState, stream_server

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
PROFILE = f"""name = "scripted"
command = "{sys.executable} -m tests.support.servers.serve_stream --port {{port}} --model {{model}}"
[setting.gap]
flag = "--gap"
type = "float"
low = 0.001
high = 0.02
default = 0.02
help = "Time between two tokens."
"""
LOAD = {"concurrency": 2, "requests": 20, "input_tokens": 8, "output_tokens": 4}


@pytest.fixture
def url():
    with stream_server(ServerState(script=lambda body: Script(first_s=0.005, gap_s=0.002))) as (url, _):
        yield url


async def in_a_running_loop(call):
    """As in a notebook's cell: the call blocks a thread whose event loop runs."""
    assert asyncio.get_running_loop().is_running()
    return call()


def test_a_run_inside_an_event_loop_prints_nothing(url, tmp_path, capfd):
    run = asyncio.run(in_a_running_loop(lambda: loadgen.measure(url=url, out=tmp_path / "r", **LOAD)))

    assert capfd.readouterr() == ("", "")
    assert run.summary["counts"]["ok"] == 20
    assert len(run.requests) >= 20
    assert run.requests["ttft_s"].notna().any()
    assert run.verdict in ("valid", "degraded", "invalid")
    assert run.value("requests_per_s") == run.summary["rates"]["requests_per_s"]["value"]
    assert run.report(tmp_path / "page") == tmp_path / "page" / "report.html"
    assert loadgen.Run.load(tmp_path / "r").summary == run.summary
    words = ["run", "--url=" + url, *words_of({"out": tmp_path / "r", **LOAD})]
    assert run.analysis.run.manifest.command == ["tgi-bench", *words]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: loadgen.measure(rate=3), loadgen.UsageError, "`rate` is 3.0 but mode 'closed' has no rate"),
        (lambda: loadgen.measure(speed=3), loadgen.UsageError, "unrecognized arguments: --speed=3"),
        (lambda: loadgen.measure(concurrency="many"), loadgen.UsageError, "`concurrency` is 'many'"),
        (lambda: loadgen.measure(slo="output_tokens_per_s > 5"), loadgen.UsageError, "not a metric of a single"),
        (lambda: loadgen.measure(json=True), loadgen.UsageError, "`json` is True but is a flag of the command"),
        (lambda: loadgen.measure(url="http://127.0.0.1:9"), loadgen.TargetError, "127.0.0.1:9"),
        (lambda: loadgen.sweep([4]), loadgen.UsageError, "`points` is '4': give 2 to 64 loads"),
        (lambda: loadgen.compare("here", "there"), loadgen.UsageError, "'here' is not a side of a comparison"),
        (lambda: tuner.tune({"study": {"trials": 0}}), loadgen.UsageError, "`study.trials` is 0"),
        (lambda: tuner.tune(trials="some"), loadgen.UsageError, "argument --trials: invalid int value: 'some'"),
        (lambda: tuner.tune({"param": {"x": {"type": "bool"}}}), tuner.TunerError, "not a setting of the server"),
    ],
    ids=range(11),
)
def test_a_call_raises_the_error_of_its_command(call, error, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(error, match=re.escape(message)):
        call()

    assert capfd.readouterr() == ("", "")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_packages_offer_their_functions_and_nothing_private():
    assert {"measure", "sweep", "compare", "Run", "UsageError"} <= set(dir(loadgen))
    assert set(dir(tuner)) == {"Study", "TunerError", "tune"}
    for package in (loadgen, tuner):
        assert not [name for name in dir(package) if name.startswith("_")]
        assert all(
            getattr(package, name).__doc__ or issubclass(getattr(package, name), Exception) for name in dir(package)
        )
    with pytest.raises(AttributeError, match="module 'loadgen' has no attribute 'measures'"):
        _ = loadgen.measures


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_code_of_the_page_runs_inside_an_event_loop(url, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PAGE.parents[1]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-server.toml").write_text(PROFILE)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    code = "".join(blocks).replace("http://127.0.0.1:3000", url)
    names: dict[str, object] = {}

    asyncio.run(in_a_running_loop(lambda: exec(compile(code, str(PAGE), "exec"), names)))

    assert names["run"].summary["counts"]["ok"] == 40
    assert any("measuring" in line for line in names["lines"])
    assert list(names["sweep"].runs) == [1, 2]
    assert names["comparison"].comparison.num_pairs == 2
    study = names["study"]
    assert len(study.trials) == 3
    assert study.report.exists()
    assert study.directory == Path("studies/from-python")
