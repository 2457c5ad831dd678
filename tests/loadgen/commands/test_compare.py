import contextlib
import json
import xml.etree.ElementTree as ElementTree

import pytest

from loadgen import cli, program
from loadgen.commands import compare, comparison_args
from loadgen.errors import MeasurementError
from reports.gate.side_run import SideRun

SIDES = ["compare", "--server-a", "serve old", "--server-b", "serve new", "--duration", "5s"]
VALUES = dict.fromkeys(("ttft_p50_ms", "tpot_p50_ms", "ttft_p95_ms", "tpot_p95_ms", "e2e_p50_ms", "e2e_p95_ms"), 20.0)


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)
    for name in compare.GITHUB:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def slower(monkeypatch):
    """Side B takes `slower.factor` times as long; the runs differ by a little."""

    class Slower:
        factor = 1.0
        runs = 0

        def live_measure(self, load, options, progress):
            def measure(side, directory):
                self.runs += 1
                factor = (self.factor if side.letter == "b" else 1.0) * (1 + 0.002 * (self.runs % 3))
                values = {name: value * factor for name, value in VALUES.items()}
                values |= {"output_tokens_per_s": 900 / factor, "requests_per_s": 9 / factor}
                values |= {"error_rate": 0.0, "gap_p99_ms": 30.0}
                return SideRun(side.label, values)

            return measure

    double = Slower()
    monkeypatch.setattr(compare, "live_measure", double.live_measure)
    return double


def test_a_regression_exits_1_and_is_written_for_people_and_for_ci(slower, tmp_path, capsys, monkeypatch):
    slower.factor = 1.2
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))

    code = cli.main([*SIDES, "--out", "gate", "--junit", "gate.xml", "--md", "gate.md", "--label-b", "new"])

    assert code == 1
    shown = capsys.readouterr().out
    assert shown.startswith("Regression")
    assert "::error" in shown
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()
    assert suite.find(".//failure") is not None
    assert "Regression" in (tmp_path / "summary.md").read_text()
    assert "<!-- tgi-bench compare -->" in (tmp_path / "gate.md").read_text()
    assert (tmp_path / "gate/report.html").exists()
    assert json.loads((tmp_path / "gate/comparison.json").read_text())["verdict"] == "regression"


def test_a_command_against_itself_passes(slower, capsys):
    assert cli.main([*SIDES, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"] == "pass"
    assert content["metrics"]["output_tokens_per_s"]["gated"] is True


def test_a_missed_requirement_fails_a_comparison_that_passes(slower):
    assert cli.main([*SIDES, "--require", "ttft_p95_ms < 10"]) == 1


def test_a_stored_comparison_is_reported_again_unchanged(slower, tmp_path, capsys):
    slower.factor = 1.2
    assert cli.main([*SIDES, "--out", "gate", "--require", "ttft_p50_ms < 1"]) == 1
    shown, page = capsys.readouterr().out, (tmp_path / "gate/report.html").read_bytes()

    assert cli.main(["report", "gate", "--out", "again"]) == 0

    assert capsys.readouterr().out == shown
    assert (tmp_path / "again/report.html").read_bytes() == page
    (tmp_path / "gate/comparison.json").write_text('{"schema_version": 1}')
    assert cli.main(["report", "gate"]) == 2
    assert "not a readable comparison (KeyError: 'runs')" in capsys.readouterr().err


def test_a_stored_comparison_is_not_overwritten(slower, capsys):
    assert cli.main([*SIDES, "--out", "gate"]) == 0
    assert cli.main([*SIDES, "--out", "gate"]) == 2
    assert "already holds a comparison" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pairs", "1"], "`pairs` is 1 but must be 2 to 100"),
        (["--min-pairs", "9", "--max-pairs", "5"], "`min_pairs` is 9 but `max_pairs` is 5"),
        (["--min-effect", "1%"], "`min_effect` is '1%' but must be 3% to 100%"),
        (["--require", "fast please"], "is not a requirement"),
        (["--require", "speed < 3"], "unknown metric 'speed'"),
        (["--docker-args", "--gpus all"], "`docker_args` is '--gpus all' but no side is an image"),
        (["--gate", "ttft"], "unknown metric 'ttft'"),
        (["--concurrency", "0"], "`concurrency` is '0'"),
    ],
)
def test_a_wrong_flag_is_a_usage_error_that_names_it(slower, capsys, flags, message):
    assert cli.main([*SIDES, *flags]) == 2
    assert message in capsys.readouterr().err
    assert slower.runs == 0


def test_more_metrics_are_gated_on_request():
    options = comparison_args.gated_options(["ttft_p95_ms"])

    assert "ttft_p95_ms" in options.gated
    assert "ttft_p95_ms" not in options.shown


def test_reliability_F48_a_side_that_cannot_be_built_is_an_error_in_every_output(slower, tmp_path, capsys, monkeypatch):
    def cannot(*_):
        raise MeasurementError("could not install the revision:\n\x1b[31mno compiler")

    monkeypatch.setattr(compare, "open_side", cannot)

    code = cli.main(["compare", "git:main", "git:HEAD", "--out", "gate", "--junit", "gate.xml"])

    assert code == 4
    assert "could not install the revision" in capsys.readouterr().out
    error = ElementTree.parse(tmp_path / "gate.xml").getroot().find(".//error")
    assert "no compiler" in error.get("message")
    assert slower.runs == 0


def test_a_side_that_dies_keeps_the_pairs_and_the_names_of_both(slower, tmp_path, monkeypatch):
    measured = []

    def live_measure(load, metrics, progress):
        def measure(side, directory):
            measured.append(side.letter)
            if len(measured) == 2:
                raise MeasurementError("new ended with exit code 1")
            return SideRun(side.label, VALUES)

        return measure

    monkeypatch.setattr(compare, "live_measure", live_measure)

    assert cli.main([*SIDES, "--label-b", "new", "--out", "gate"]) == 4
    found = json.loads((tmp_path / "gate/comparison.json").read_text())
    assert (found["a"], found["b"], found["verdict"]) == ("A", "new", "not_measured")
    assert found["refusals"] == ["pair 1 could not be measured: new ended with exit code 1"]


class Server:
    """A launched server that answers at once; B is slower by 20 %."""

    pid = None

    def __init__(self, side):
        self.side = side

    def measured(self, directory, salt):
        return lambda: self.run(directory, salt)

    def run(self, directory, salt):
        factor = (1.2 if self.side.letter == "b" else 1.0) * (1 + 0.002 * (len(salt) % 3))
        values = {name: value * factor for name, value in VALUES.items()}
        return SideRun(self.side.label, values | {"output_tokens_per_s": 900 / factor, "error_rate": 0.0})


class SliceMeasure:
    @contextlib.contextmanager
    def launch(self, side, log):
        yield Server(side)

    def salt_of(self, text):
        return text


def test_trust_C5_gate_an_interleaved_comparison_explains_its_slices_and_is_reported_again(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(compare, "live_measure", lambda load, metrics, progress, start_load: SliceMeasure())
    monkeypatch.setattr(compare, "num_gpus", lambda: 0)

    assert cli.main([*SIDES, "--interleave", "3", "--pairs", "3", "--out", "gate"]) == 1

    shown = capsys.readouterr().out
    assert "3 pairs of launches with 3 interleaved slices a side: both servers of a pair are launched once" in shown
    assert "noise, standard deviations in %:" in shown
    assert all(word in shown for word in ("launch", "drift", "within", "separate"))
    page = (tmp_path / "gate/report.md").read_text()
    assert "slices alternate A B B A" in page
    assert "## Noise" in page
    assert cli.main(["report", "gate", "--out", "again"]) == 0
    assert capsys.readouterr().out == shown


def test_interleaved_slices_of_a_stored_side_are_refused(capsys):
    assert cli.main(["compare", "stored:.", "http://127.0.0.1:1", "--no-relaunch", "--interleave", "3"]) == 2
    assert "`interleave` is 3 but . is stored" in capsys.readouterr().err


def test_equal_contention_of_a_server_that_is_not_started_here_is_refused(capsys):
    words = ["compare", "http://127.0.0.1:1", "http://127.0.0.1:2", "--no-relaunch", "--equal-contention"]

    assert cli.main(words) == 2
    assert "`equal_contention` is set but side A (http://127.0.0.1:1) is not a process" in capsys.readouterr().err
