import json

import pytest

from loadgen import cli, program


@pytest.fixture
def planned(monkeypatch, tmp_path, capsys):
    """The load that a command line plans, with variables, and its exit code."""
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)
    monkeypatch.chdir(tmp_path)

    def plan(*words, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"TGI_BENCH_{name}", value)
        code = cli.main(["run", "--dry-run", *words])
        written = capsys.readouterr()
        return code, json.loads(written.out)["load"] if code == 0 else written.err

    return plan


def test_pages_2_a_flag_overrides_a_variable_which_overrides_the_file_and_the_default(planned, tmp_path):
    (tmp_path / "load.toml").write_text("concurrency = 2\nseed = 2\nlabel = 'file'\n")

    _, load = planned("--seed", "4", CONFIG="load.toml", SEED="3", CONCURRENCY="3")

    assert (load["seed"], load["concurrency"], load["label"], load["workers"]) == (4, 3, "file", 1)


def test_pages_2_variables_of_switches_and_repeatable_flags(planned):
    _, load = planned(STREAM="false", INSECURE="1", SLO="ttft_p95_ms < 500\ntpot_mean_ms < 50", LABEL="")
    assert (load["stream"], load["insecure"], load["label"]) == (False, True, "")
    assert load["slo"] == ["ttft_p95_ms < 500", "tpot_mean_ms < 50"]

    assert planned("--stream", "--slo", "e2e_p95_ms < 900")[1]["slo"] == ["e2e_p95_ms < 900"]


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("CONCURENCY", "TGI_BENCH_CONCURENCY sets nothing; did you mean 'TGI_BENCH_CONCURRENCY'?"),
        ("TOLERENCE", "did you mean 'TGI_BENCH_TOLERANCE'?"),  # of `search`
        ("JOINKEY", "did you mean 'TGI_BENCH_JOIN_KEY'?"),
        ("TOLERANCE", ""),
        ("JOIN_KEY", ""),
        ("SERVICE_HOST", ""),  # set by Kubernetes for a service named tgi-bench
    ],
)
def test_pages_2_a_misspelt_variable_is_reported_with_the_nearest(monkeypatch, tmp_path, capsys, name, reported):
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"TGI_BENCH_{name}", "8")

    assert cli.main(["run", "--dry-run"]) == 0

    error = capsys.readouterr().err
    assert (reported in error) if reported else ("sets nothing" not in error)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("CONCURRENCY", "many", "set by the environment: TGI_BENCH_CONCURRENCY"),
        ("STREAM", "maybe", "TGI_BENCH_STREAM is 'maybe', but must be true or false"),
        ("MODE", "poison", "did you mean 'poisson'?"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(planned, name, value, message):
    code, error = planned(**{name: value})

    assert code == 2
    assert message in error


def test_a_misspelt_key_of_a_file_is_refused_with_the_nearest(planned, tmp_path):
    (tmp_path / "load.toml").write_text("concurency = 2\n")

    code, error = planned("--config", "load.toml")

    assert code == 2
    assert "`concurency` is not a setting of a load; did you mean 'concurrency'?" in error
