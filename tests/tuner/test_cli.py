import json
import signal
import subprocess
import tomllib

import pytest

from loadgen import program
from loadgen.interrupts import Interrupted
from tests.tuner.studies import FormulaServer
from tuner import cli
from tuner.commands.serve import shell_line
from tuner.study import open_search


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


@pytest.fixture
def server(monkeypatch):
    formula = FormulaServer()
    make = open_search.make_search
    monkeypatch.setattr(
        open_search, "make_search", lambda folder, config, setup, **how: make(folder, config, setup, formula, **how)
    )
    return formula


def test_a_study_ends_with_a_configuration_that_the_launcher_reads(server, tmp_path, capsys):
    assert cli.main(["run", "--trials", "5", "--study", "s", "--rounds", "2"]) == 0

    best = tomllib.loads((tmp_path / "studies/s/best.toml").read_text())
    assert best["model_id"] == "preset:tiny-llama"
    assert best["tuned_by"].startswith("s/")
    assert best["tuned_by"].partition("?")[0].endswith("/confirmed")
    assert "trial" in capsys.readouterr().out


def test_the_same_command_continues_its_study_and_launches_nothing_more(server, capsys):
    command = ["run", "--trials", "4", "--rounds", "2", "--json"]
    cli.main(command)
    first = json.loads(capsys.readouterr().out)
    launches = len(server.launches)

    cli.main(command)

    assert json.loads(capsys.readouterr().out) == first
    assert len(server.launches) == launches


def test_without_rounds_the_winner_is_not_confirmed_and_is_not_served(server, capsys):
    cli.main(["run", "--trials", "3", "--study", "s", "--rounds", "0"])

    assert cli.main(["serve", "--study", "s", "--dry-run"]) == 2
    assert "is not confirmed" in capsys.readouterr().err
    assert cli.main(["serve", "--study", "s", "--unconfirmed", "--dry-run"]) == 0
    assert "--config-file studies/s/best.toml" in capsys.readouterr().out


def test_every_trial_is_a_line_of_the_table(server, tmp_path):
    cli.main(["run", "--trials", "4", "--study", "s", "--rounds", "0"])

    lines = (tmp_path / "studies/s/trials.csv").read_text().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("trial,outcome,output_tokens_per_s,max_batch_prefill_tokens")


def test_a_space_file_narrows_the_search(server, tmp_path):
    (tmp_path / "space.toml").write_text(
        """
        [study]
        name = "narrow"
        trials = 4
        [load]
        concurrency = 3
        [param]
        max_batch_prefill_tokens = { type = "int", low = 512, high = 1024, multiple_of = 64 }
        """
    )

    assert cli.main(["run", "space.toml", "--rounds", "0"]) == 0

    budgets = [each["max_batch_prefill_tokens"] for each in server.launches if "max_batch_prefill_tokens" in each]
    assert len(budgets) == 3
    assert all(512 <= budget <= 1024 for budget in budgets)
    assert all(each.get("prefill_chunking", True) for each in server.launches)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[study]\ntrails = 3", "trails"),
        ("[load]\nurl = 'http://x'", "`url`"),
        ("[load]\nconcurrency = 0", "`concurrency` is 0"),
        ("[server]\nkind = 'podman'", "kind"),
        ("[param]\nmax_waiting = { type = 'bool' }", "`max_waiting`"),
        ("[param]\nquantize = { type = 'choice', values = ['none'] }", "no parameter to search"),
        ("not toml", "not TOML"),
    ],
)
def test_a_wrong_file_is_a_usage_error_that_names_the_key(server, tmp_path, capsys, content, message):
    (tmp_path / "space.toml").write_text(content)

    assert cli.main(["run", "space.toml"]) == 2
    assert message in capsys.readouterr().err
    assert server.launches == []


def test_serving_without_a_study_is_an_error_with_the_remedy(capsys):
    assert cli.main(["serve"]) == 2
    assert "tgi-tune run" in capsys.readouterr().err


def test_a_finished_study_is_exported_in_every_format_and_reported(server, tmp_path, capsys):
    cli.main(["run", "--trials", "4", "--study", "s", "--rounds", "2", "--simulator", "off", "--noise-runs", "2"])
    capsys.readouterr()

    for kind, text in [("toml", "tuned_by"), ("env", "MODEL_ID="), ("cli", "--model-id")]:
        assert cli.main(["export", "--study", "s", "--as", kind]) == 0
        assert text in capsys.readouterr().out
    # The study's model is a preset, which a TGI does not have.
    assert cli.main(["export", "--study", "s", "--as", "k8s"]) == 2
    assert "a preset of this package, which TGI cannot load" in capsys.readouterr().err
    plan = ["export", "--study", "s", "--plan", "plan.json"]
    for words, message in (
        ([*plan, "--as", "env"], "--plan is not a flag of --as env"),
        (
            [*plan, "--as", "load-jobs", "--workers", "1", "--image", "i", "--out", "jobs"],
            "--plan is not a flag of --as load-jobs",
        ),
        (["export", "--study", "s", "--as", "k8s", "--prometheus", "http://p:9090"], "--prometheus needs --plan"),
        (["export", "--study", "s", "--as", "helm", "--autoscaler", "hpa"], "--autoscaler needs --plan"),
        (["export", "--study", "s", "--as", "helm"], "--as helm needs --out DIR"),
        ([*plan, "--as", "k8s", "--autoscaler", "hpa", "--prometheus", "http://p:9090"], "flag of --autoscaler hpa"),
    ):
        assert cli.main(words) == 2
        assert message in capsys.readouterr().err
    jobs = ["export", "--study", "s", "--workers", "2", "--image", "tgi-bench:1", "--out", "jobs"]
    assert cli.main([*jobs, "--as", "load-jobs", "--url", "http://server"]) == 0
    names = {"kustomization.yaml", "load.toml", "master.yaml", "runs.yaml", "service.yaml", "workers.yaml"}
    assert {path.name for path in (tmp_path / "jobs").iterdir()} == names
    assert cli.main([*jobs, "--as", "study-jobs", "--storage", "grpc://storage:13000"]) == 0
    for words, message in (
        (["--as", "load-jobs"], "needs --url URL"),
        (["--as", "load-jobs", "--url", "http://server", "--trial", "1"], "--trial is not a flag of --as load-jobs"),
        (["--as", "study-jobs", "--url", "http://server"], "--url is not a flag of --as study-jobs"),
        (["--as", "study-jobs"], "the study's storage, journal, is a file on this machine"),
        (["--as", "k8s"], "--workers is not a flag of --as k8s"),
        (["--as", "helm"], "--workers is not a flag of --as helm"),
    ):
        assert cli.main([*jobs, *words]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["report", "--study", "s"]) == 0
    assert cli.main(["dashboard", "--study", "s", "--write-only", "--json"]) == 0
    opened = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert opened["folder"] == "studies/s/dashboard"
    assert {path.name for path in (tmp_path / opened["folder"]).iterdir()} == {"artifacts", "study.log"}
    assert list((tmp_path / opened["folder"] / "artifacts").iterdir())
    html = (tmp_path / "studies/s/report.html").read_text()
    assert "Change the settings" in html
    assert "with preset:tiny-llama · 4 configurations tried" in html
    for name in (
        "best.env",
        "run-own.sh",
        "reproduce.sh",
        "load.toml",
        "trials.parquet",
    ):
        assert (tmp_path / "studies/s" / name).exists()


def test_the_balancer_is_exported_without_a_study(capsys):
    words = ["export", "--as", "nginx", "--replica", "a:3000", "--replica", "[::1]:3001"]

    assert cli.main([*words, "--policy", "prefix_hash"]) == 0
    text = capsys.readouterr().out
    assert "hash $prompt_start consistent;" in text
    assert "server [::1]:3001 fail_timeout=1s;" in text
    for more, message in (
        (["--trial", "1"], "--trial is not a flag of --as nginx"),
        (["--replica", "a;b"], "--replica is 'a;b', but must be HOST:PORT"),
    ):
        assert cli.main([*words, *more]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["export", "--as", "nginx"]) == 2
    assert "--as nginx needs --replica HOST:PORT" in capsys.readouterr().err
    assert cli.main(["export", "--as", "toml", "--policy", "prefix_hash"]) == 2
    assert "--policy is not a flag of --as toml" in capsys.readouterr().err


def test_confirm_launches_only_missing_rounds(server, capsys):
    cli.main(["run", "--trials", "4", "--study", "s", "--rounds", "2", "--simulator", "off"])
    launches = len(server.launches)

    assert cli.main(["confirm", "--study", "s"]) == 0
    assert len(server.launches) == launches


def test_noise_is_measured_once_and_printed(server, capsys):
    command = ["noise", "--study", "s", "--noise-runs", "3", "--simulator", "off", "--json"]
    assert cli.main(command) == 0
    printed = json.loads(capsys.readouterr().out)

    assert printed["runs"] == len(server.launches) == 3
    assert printed["deviations"]["output_tokens_per_s"] == 0.0
    cli.main(command)
    assert len(server.launches) == 3


def test_a_worker_without_a_study_and_an_export_without_a_verdict_are_usage_errors(server, capsys):
    assert cli.main(["worker"]) == 2
    assert "tgi-tune run" in capsys.readouterr().err
    cli.main(["noise", "--study", "s", "--simulator", "off"])
    assert cli.main(["export", "--study", "s"]) == 2
    assert "has no verdict" in capsys.readouterr().err


def test_export_fails_if_no_configuration_meets_the_limits(server, tmp_path, capsys):
    (tmp_path / "space.toml").write_text(
        """
        [study]
        name = "limits_out_of_reach"
        trials = 3
        simulator = "off"
        noise_runs = 0
        [objective]
        maximize = "output_tokens_per_s"
        [[objective.limit]]
        metric = "output_tokens_per_s"
        min = 1e6
        """
    )

    assert cli.main(["run", "space.toml", "--rounds", "0"]) == 1
    assert cli.main(["export", "--study", "limits_out_of_reach"]) == 1
    assert not (tmp_path / "studies/limits_out_of_reach/best.toml").exists()


def test_only_a_command_of_a_study_promises_to_continue(server, monkeypatch, tmp_path, capsys):
    def stop(*_args, **_settings):
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr("tuner.commands.run.conclude", stop)
    monkeypatch.setattr("tuner.commands.serve.find_best", stop)

    assert cli.main(["run", "--trials", "2", "--study", "s", "--rounds", "0", "-q"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped; the same command continues the study"
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_printed_launch_can_be_pasted():
    line = shell_line({"NAME": "a b; c"}, ["printenv", "NAME"])

    assert line == "NAME='a b; c' printenv NAME"
    assert subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout == "a b; c\n"
