import json
import re
from pathlib import Path

import pytest

from loadgen import program
from tuner import cli

QUICK = Path(__file__).parents[3] / "docs" / "quick-study.toml"


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


def checked(capsys, *words):
    assert cli.main(["check", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tuning_8_waiting_parameters_cannot_act_with_chunked_prefill(tmp_path, capsys):
    (tmp_path / "space.toml").write_text(
        """
        [server.fixed]
        prefill_chunking = true
        cpu_memory_gib = 0.06
        [param]
        max_batch_prefill_tokens = { type = "int", low = 64, high = 4096 }
        max_waiting_tokens = { type = "int", low = 1, high = 100 }
        waiting_served_ratio = { type = "float", low = 0.1, high = 2.0 }
        """
    )

    assert set(checked(capsys, "space.toml")["cannot_act"]) == {"max_waiting_tokens", "waiting_served_ratio"}


def test_tuning_8_the_memory_fraction_cannot_act_if_the_load_never_fills_it(tmp_path, capsys):
    (tmp_path / "space.toml").write_text("[server.fixed]\ncpu_memory_gib = 4.0\n[load]\nconcurrency = 8\n")

    plan = checked(capsys, "space.toml")

    assert "cuda_memory_fraction" in plan["cannot_act"]
    assert "cuda_memory_fraction" not in plan["space"]


def test_tuning_8_every_parameter_of_the_quick_study_can_act(capsys):
    plan = checked(capsys, QUICK)

    assert plan["cannot_act"] == {}
    assert plan["launches"] == 2 + 12 + 9


def test_tuning_9_without_a_file_the_space_is_derived_and_the_plan_printed(capsys):
    plan = checked(capsys)

    assert {"max_batch_prefill_tokens", "prefill_chunking", "max_waiting_tokens"} <= set(plan["space"])
    assert plan["launches"] == 4 + 40 + 20
    assert plan["hours"] > 0
    assert plan["study"].startswith("studies/tiny-llama-")


def test_quick_adds_eleven_launches_to_the_search(capsys):
    assert checked(capsys, "--quick", "--trials", "6")["launches"] == 11 + 6


def test_a_wide_space_gets_more_trials(tmp_path, capsys):
    names = ("max_batch_prefill_tokens", "max_batch_total_tokens", "max_waiting_tokens", "max_concurrent_requests")
    more = ("max_best_of", "max_stop_sequences", "max_top_n_tokens")
    lines = [f'{name} = {{ type = "int", low = 600, high = 4096 }}' for name in (*names, *more)]
    fixed = "[server.fixed]\ncpu_memory_gib = 0.06\nprefill_chunking = false\n"
    (tmp_path / "space.toml").write_text("\n".join([fixed, "[param]", *lines]))

    assert "80 to search" in checked(capsys, "space.toml")["plan"]


PROFILE = """
name = "mine"
command = "serve {model} --port {port}"
[setting.slots]
flag = "--slots"
type = "int"
low = 1
high = 8
default = 4
help = "Requests at one time."
[setting.pin]
flag_true = "--pin"
type = "bool"
"""


@pytest.mark.parametrize("place", ["flag", "file"])
def test_check_explains_the_profile_of_a_flag_or_of_a_file_beside_the_space(tmp_path, capsys, place):
    folder = tmp_path / "spaces"
    folder.mkdir()
    (folder / "mine.toml").write_text(PROFILE)
    (folder / "space.toml").write_text("[server]\nprofile = 'mine.toml'\n[server.fixed]\npin = true\n")
    words = ["--server-profile", "spaces/mine.toml"] if place == "flag" else ["spaces/space.toml"]

    assert cli.main(["check", *words, "--model-id", "m"]) == 0

    text = capsys.readouterr().out
    assert "  slots (--slots): int 1 to 8; default: 4; searched: int 1 to 8\n" in text
    assert ("fixed: true" in text) is (place == "file")
    assert "default command: serve m --port 8080" in text


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ("[server.fixed]\nparalel = 4", "`paralel` is not a setting of profile llamacpp; the nearest is `parallel`"),
        ("[server.fixed]\nparallel = 'many'", "`parallel` is 'many': must be an integer"),
        ("[param]\nparalel = {type='bool'}", r"\[param\] has `paralel`.*the nearest is `parallel`"),
        ("[param]\nparallel = {type='number'}", "`param.parallel.type` is 'number'"),
        ("[param]\nbatch = {type='choice', values=['x', 'y']}", "no possible configuration found.*`batch` is 'x'"),
        (
            "[param]\nparallel = {type='bool', when='batch > 3'}\nbatch = {type='choice', values=['x', 'y']}",
            "`batch > 3` cannot be computed for 'x' and 3",
        ),
        (
            "[param]\nparallel = {type='int', low=1, high=8}\n[[forbid]]\nif = 'parallel >= 1'",
            "no possible configuration found: all 1,000 random points are refused: parallel >= 1",
        ),
    ],
)
def test_check_refuses_a_wrong_space_with_its_file_key_and_rule(tmp_path, capsys, space, expected):
    (tmp_path / "space.toml").write_text(f"[server]\nprofile = 'llamacpp'\n{space}\n")

    assert cli.main(["check", "space.toml"]) == 2

    assert re.search(f"space.toml: .*{expected}", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["run", "check"])
def test_pages_2_the_files_of_a_load_are_read_before_a_server_starts(tmp_path, capsys, command):
    (tmp_path / "space.toml").write_text('[load]\ntokenizer = "absent.json"\n')

    assert cli.main([command, "space.toml"]) == 2

    assert "`tokenizer` is 'absent.json': No such file or directory" in capsys.readouterr().err
    assert not (tmp_path / "studies").exists()


def test_pages_2_check_prints_one_line_if_quiet_and_the_load_if_verbose(tmp_path, capsys):
    (tmp_path / "space.toml").write_text("[study]\nname = 'mine'\n[load]\nconcurrency = 5\n")

    assert cli.main(["check", "space.toml", "-q"]) == 0
    quiet = capsys.readouterr().out
    assert cli.main(["check", "space.toml", "-v"]) == 0
    verbose = capsys.readouterr().out

    assert quiet.count("\n") == 1
    assert " ".join(verbose.split()).startswith(quiet.strip())
    assert "concurrency 5" in verbose.splitlines()[-1]


def test_pages_2_the_plan_fits_80_columns(capsys):
    assert cli.main(["check", "--concurrency", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cli.main(["check", "--concurrency", "8", "--quiet"]) == 0
    headline = capsys.readouterr().out.strip()

    assert max(map(len, lines)) <= 80
    assert re.search(r"about \d+ s each, .*(s|min|h) in all", headline)
    assert " ".join(line.strip() for line in lines).startswith(headline)


@pytest.mark.parametrize("model", ["tiny.gguf", "./models/tiny", "models/small/tiny", "/nonexistent/tiny"])
def test_the_model_file_of_a_profiled_server_must_exist(model, capsys):
    assert cli.main(["check", "--server-profile", "llamacpp", "--model-id", model]) == 2

    assert f"`model_id` is {model!r}, but there is no such file or directory" in capsys.readouterr().err


def test_a_model_file_that_exists_and_a_hub_id_are_accepted(tmp_path, capsys):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")

    for model in ("tiny.gguf", "org/model", "model", "org/model-GGUF:Q4_K_M", "s3://bucket/models/tiny.gguf"):
        assert checked(capsys, "--server-profile", "llamacpp", "--model-id", model)


def test_a_model_inside_a_container_is_not_looked_for_on_this_machine(tmp_path, capsys):
    profile = (QUICK.parents[1] / "tuner/servers/profiles/llamacpp.toml").read_text()
    (tmp_path / "boxed.toml").write_text(
        profile.replace('command = "llama-server', 'command = "docker run --rm image llama-server')
    )

    assert checked(capsys, "--server-profile", "boxed.toml", "--model-id", "/models/tiny.gguf")


def test_pages_2_the_settings_of_a_profile_fit_80_columns(capsys):
    assert cli.main(["check", "--server-profile", "llamacpp", "--model-id", "m"]) == 0

    settings = capsys.readouterr().out.partition("profile llamacpp")[2].partition("default command")[0]
    assert "kv_unified (--kv-unified or --no-kv-unified): true or false; default: true" in settings
    assert max(map(len, settings.splitlines())) <= 80


def test_pages_2_objectives_of_the_command_line_are_limits_of_a_study_without_any(tmp_path, capsys):
    (tmp_path / "limited.toml").write_text('[[objective.limit]]\nmetric = "tpot_mean_ms"\nmax = 50')

    plan = printed_plan(capsys, "--slo", "ttft_p95_ms < 500")
    limited = printed_plan(capsys, "limited.toml", "--slo", "ttft_p95_ms < 500")

    assert ("(goodput_rps)" in plan, "(ttft_p95_ms)" in plan) == (True, True)
    assert ("(tpot_mean_ms)" in limited, "(ttft_p95_ms)" in limited) == (True, False)


def printed_plan(capsys, *words):
    assert cli.main(["check", *words]) == 0
    return capsys.readouterr().out


def test_pages_2_the_help_of_a_study_has_the_defaults_of_its_load(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])

    text = " ".join(capsys.readouterr().out.split())
    defaults = {
        "--concurrency": "16",
        "--duration": "12s",
        "--warmup": "2s",
        "--input-tokens": "uniform:512,1024",
        "--output-tokens": "32",
    }
    found = {flag: re.search(rf" {flag} [A-Z]+ .*?Default (\S+)\.", text)[1] for flag in defaults}
    assert found == defaults
