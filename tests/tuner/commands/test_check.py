import json
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
