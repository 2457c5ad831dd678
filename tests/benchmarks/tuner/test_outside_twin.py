"""The benchmark of the twin from outside: its servers, its table and its exit code."""

import argparse
import json
import sys

import pytest

from benchmarks.tuner import outside_twin
from tuner.commands.simulation.simulate_outside import ACCURATE

ARGS = argparse.Namespace(
    servers=("own", "llama.cpp"), llama_server="llama-server", model="m.gguf", own_model="preset:tiny-llama",
    slots=6, max_total_tokens=512,
)  # fmt: skip


def found(**errors):
    values = {"output_tokens_per_s": 0.04, "tpot_mean_ms": 0.06, "ttft_p95_ms": 0.15} | errors
    return {
        "errors": {name: {"median": value, "p90": 2 * value} for name, value in values.items()},
        "accurate": {name: values[name] <= most for name, most in ACCURATE.items()},
        "loads": [{"load": "closed-1"}, {"load": "closed-3"}],
        "rule": {"slots": 6},
    }


def test_servers_3_both_servers_compute_with_one_thread_and_cache_no_prompts():
    own, llama = outside_twin.commands(ARGS).values()

    assert own[own.index("--compute-threads") + 1] == llama[llama.index("--threads") + 1] == "1"
    assert own[own.index("--prefix-caching") + 1] == "false"
    assert "--no-cache-prompt" in llama
    # Each slot has the context of the longest request.
    assert int(llama[llama.index("--ctx-size") + 1]) // 6 >= 512


@pytest.mark.parametrize(("ttft", "code", "cell"), [(0.15, 0, "| 15.0%"), (0.25, 1, "| 25.0%")])
def test_servers_3_the_table_has_each_error_with_its_limit(ttft, code, cell, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(outside_twin, "measure", lambda *_: found(ttft_p95_ms=ttft))
    words = ["outside_twin", "--servers", "own", "--out", str(tmp_path), "--result", str(tmp_path / "twin.json")]
    monkeypatch.setattr(sys, "argv", words)

    assert outside_twin.main() == code

    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| own")]
    assert len(rows) == len(ACCURATE)
    assert cell in rows[-1]
    assert rows[-1].split("|")[-3].strip() == ("yes" if code == 0 else "no")
    assert json.loads((tmp_path / "twin.json").read_text())["servers"]["own"]["rule"] == {"slots": 6}


def test_a_command_without_a_result_ends_the_benchmark(monkeypatch):
    monkeypatch.setattr(outside_twin.cli, "main", lambda _: 4)

    with pytest.raises(SystemExit, match="tgi-tune simulate validate ended with code 4 and no result"):
        outside_twin.simulate("validate", "--url", "http://127.0.0.1:1")
