"""Stored runs as sides, and the commands that keep them: baseline, history, noise; all without a server."""

import dataclasses
import json
import shutil

import pytest

from loadgen import cli, program
from loadgen.commands import compare, noise
from loadgen.gate.stored_sides import side_run
from reports.gate.compare import judge
from reports.gate.comparison import CompareOptions
from reports.gate.history import CommitPoint, append_point, series_of
from reports.gate.side_run import Pair, SideRun
from reports.metrics.finish_run import finish_run
from reports.run_store import load_manifest, write_manifest
from tests.support.samples.sample_run import SampleLoad, write_killed_run, write_sample_run


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)
    for name in compare.GITHUB:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Five runs in one directory, each with the commit in its manifest."""
    root, finished = (tmp_path_factory.mktemp("stored") / name for name in ("main", "finished"))
    write_sample_run(finished, SampleLoad(mode="closed", duration_s=10))
    finish_run(finished)
    for number in range(5):
        directory = root / f"run{number:02d}"
        shutil.copytree(finished, directory)
        manifest = load_manifest(directory)
        changed = {"run_id": f"r{number}", "started_at": f"2026-01-0{number + 1}", "labels": {"commit": "abc"}}
        write_manifest(directory, dataclasses.replace(manifest, **changed))
    return root


def test_runs_are_blessed_shown_listed_and_compared_against(runs, tmp_path, capsys):
    bless = ["baseline", "bless", "main", str(runs), "--reason", "release", "--author", "Ada"]

    assert cli.main(bless) == 0
    assert cli.main(bless) == 2
    assert cli.main(["baseline", "show", "main"]) == 0
    assert cli.main(["baseline", "list"]) == 0
    shown = capsys.readouterr()
    assert "replaced only on request" in shown.err
    assert "main: 5 runs, blessed" in shown.out
    assert "commit    abc" in shown.out

    assert cli.main([*bless, "--replace"]) == 0
    assert cli.main(["compare", f"stored:{runs}", "--against", "main", "--out", "again", "--json"]) == 0
    assert "## Setup" not in (tmp_path / "again/report.md").read_text()
    capsys.readouterr()
    found = json.loads((tmp_path / "again/comparison.json").read_text())
    assert (found["verdict"], found["pairs"], found["stored_runs_of_a"]) == ("pass", 5, 5)
    assert "run the two sides in pairs" in (tmp_path / "again/report.md").read_text()


@pytest.mark.slow
def test_trust_W10_a_killed_run_is_refused_everywhere_and_its_report_renders(runs, tmp_path, capsys):
    killed = tmp_path / "killed"
    for number in range(5):
        write_killed_run(killed / f"run{number}", 7, SampleLoad(mode="closed", warmup_s=0))

    assert cli.main(["baseline", "bless", "x", str(killed), "--reason", "y", "--author", "Ada"]) != 0
    assert "incomplete: stopped after 7 of 60 s" in capsys.readouterr().err
    assert cli.main(["history", "add", str(killed), "--commit", "abc"]) != 0
    assert "incomplete: stopped after 7 of 60 s" in capsys.readouterr().err
    assert cli.main(["compare", f"stored:{runs}", f"stored:{killed}", "--out", "c"]) not in (0, 1)
    assert "incomplete: stopped after 7 of 60 s" in " ".join(capsys.readouterr().out.split())
    pair = Pair(*(side_run(each, ["tpot_p50_ms"]) for each in (runs / "run00", killed / "run0")))
    assert "incomplete" in judge([pair], CompareOptions()).refusals[0].message
    assert cli.main(["report", str(killed / "run0"), "--out", "page"]) == 0
    assert (tmp_path / "page/report.html").exists()
    assert "Incomplete: stopped after 7 of 60 s" in (tmp_path / "page/report.md").read_text()


@pytest.mark.slow
def test_a_live_side_is_run_five_times_against_a_baseline(runs, tmp_path, monkeypatch, capsys):
    cli.main(["baseline", "bless", "main", str(runs), "--reason", "release", "--author", "Ada"])
    baseline = json.loads((tmp_path / "baselines/main.json").read_text())["runs"][0]
    measured = []

    def live_measure(load, metrics, progress):
        def measure(side, directory):
            measured.append(directory.name)
            values = {
                name: (value or 0) * (2 if name.endswith("_ms") else 1) for name, value in baseline["metrics"].items()
            }
            return SideRun(side.label, values, identity=baseline["identity"], device=baseline["device"])

        return measure

    monkeypatch.setattr(compare, "live_measure", live_measure)
    capsys.readouterr()

    assert cli.main(["compare", "command:serve new", "--against", "main", "--json"]) == 3
    assert measured == ["run01", "run02", "run03", "run04", "run05"]
    assert json.loads(capsys.readouterr().out)["metrics"]["tpot_p50_ms"]["decision"] == "inconclusive"

    run = SideRun("x", {}, identity=baseline["identity"], device=baseline["device"])
    for number in range(6):
        medians = {name: value for name, value in baseline["metrics"].items() if value}
        append_point(tmp_path / "history.jsonl", CommitPoint(f"c{number}", series_of(run), "d", medians, 5, "2026"))
    assert cli.main(["compare", "command:serve new", "--against", "main", "--json"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["baseline", "show", "absent"], "absent.json: No such file"),
        (["baseline", "show", "../secret"], "is not a baseline name"),
        (["baseline", "bless", "x", ".", "--reason", "y"], "not a run directory, and holds no runs"),
        (["compare", "command:serve", "--against", "absent"], "absent.json: No such file"),
        (["compare", "command:serve", "stored:."], "give the stored side first"),
        (["compare", "command:serve", "http://localhost:1"], "add --no-relaunch"),
        (["compare", "a.toml"], "a comparison needs two sides"),
        (["compare", "a.toml", "b.toml", "c.toml"], "a comparison needs two sides"),
        (["compare", "a.toml", "--against", "main", "--server-a", "x"], "`against` and `server_a` both name side A"),
        (["history", "check"], "no history"),
        (["history", "add", "."], "not a run directory"),
        (["noise", "stored:."], "noise needs live runs"),
        (["noise", "command:serve", "--runs", "1"], "`runs` is 1 but must be 2 to 100"),
        (["noise", "command:serve", "--gate", "speed"], "unknown metric 'speed'"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error_that_names_it(words, message, capsys):
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


def test_history_stores_a_commits_medians_and_finds_where_they_changed(runs, tmp_path, capsys, monkeypatch):
    assert cli.main(["history", "add", str(runs)]) == 0
    assert "abc: medians of 5 runs" in capsys.readouterr().out
    [line] = (tmp_path / "history.jsonl").read_text().splitlines()
    point = json.loads(line)
    (tmp_path / "history.jsonl").unlink()
    for number in range(24):
        slower = 1.3 if number >= 14 else 1.0
        noisy = 1 + 0.004 * (number * 7 % 5)
        metrics = point["metrics"] | {"tpot_p50_ms": 20 * slower * noisy}
        append_point(tmp_path / "history.jsonl", CommitPoint(f"c{number}", point["series"], "d", metrics, 5, "2026"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")

    assert cli.main(["history", "check"]) == 0
    shown = capsys.readouterr().out
    assert "TPOT p50: +30" in shown
    assert "between c13 and c14" in shown
    assert "::warning title=Performance history::" in shown
    assert cli.main(["history", "check", "--fail"]) == 1
    assert cli.main(["history", "check", "--fail", "--metric", "error_rate"]) == 0
    assert cli.main(["history", "check", "--metric", "speed"]) == 2


def test_noise_measures_one_side_and_reports_the_regression_that_is_found(tmp_path, monkeypatch, capsys):
    def live_measure(load, metrics, progress):
        def measure(side, directory):
            number = int(directory.name[-2:])
            return SideRun(side.label, dict.fromkeys(metrics, 20.0 + 0.01 * number))

        return measure

    monkeypatch.setattr(noise, "live_measure", live_measure)

    assert cli.main(["noise", "command:serve", "--runs", "4", "--out", "n", "--label", "mine"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mine: 4 runs, in n")
    assert "With 12 pairs, 80 % of comparisons find a regression of this size: Output tokens/s 3.0 %" in shown
    assert json.loads((tmp_path / "n/noise.json").read_text())["metrics"]["tpot_p50_ms"]["gated"] is True
    assert cli.main(["noise", "command:serve", "--out", "n"]) == 2


def test_a_dry_run_prints_both_servers_and_the_load_and_starts_nothing(tmp_path, capsys):
    words = [
        "compare",
        "command:serve --api-key hush",
        "http://host:1",
        "--no-relaunch",
        "--dry-run",
        "--concurrency",
        "3",
    ]

    assert cli.main(words) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["sides"]["a"]["server"] == ["serve", "--api-key", "***"]
    assert planned["sides"]["b"]["server"] == ["http://host:1"]
    assert planned["load"]["concurrency"] == 3
    assert not list(tmp_path.iterdir())
