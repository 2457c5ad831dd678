"""The subcommands of `tgi-tune simulate`, with files as inputs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pandas import read_parquet

from reference_server.router.scheduling.step_work import StepWork
from reports.metrics.summary import metric_value, summarize
from reports.saved_run import load_run
from tuner.cli import main
from tuner.simulator.fitting.linear_law import LinearLaw

LAW = LinearLaw((9e6, 0.0, 6e4, 0.0, 0.0, 6e6, 2e5, 0.0, 0.0, 80.0))
BY_HAND = {"format": 1, "coefficients_ns": {"prefill": 1e7, "tokens": 1e5, "decode": 5e6, "rows": 1e6}}
ROOM = ("--set", "max_batch_prefill_tokens=4096", "--set", "max_batch_total_tokens=20000")


@pytest.fixture
def by_hand(tmp_path: Path) -> str:
    path = tmp_path / "hand.json"
    path.write_text(json.dumps(BY_HAND))
    return str(path)


def write_trace(path: Path, quantize: str | None = None) -> Path:
    """A step trace as the router writes it, of a known law."""
    works = [StepWork(p, p * n, p * n * n) for p in (1, 2, 4) for n in (64, 256, 1024)] * 2
    works += [StepWork(rows=r, kv=r * n) for r in (1, 2, 4, 8, 16, 32) for n in (128, 512, 1500)] * 2
    options = {"max_batch_prefill_tokens": 4096, "max_batch_total_tokens": 20_000, "block_size": 16, "schema": "v3"}
    facts = {
        "model_id": "m",
        "scheduler": options,
        "settings": {"quantize": {"value": quantize}, "cuda_memory_fraction": {"value": 1.0}},
        "engine": {"memory": {"weight_bytes": 5}},
    }
    head = {"format": 2, "columns": [*StepWork._fields, "total_ns", "wall_ns"], "facts": facts}
    rows = [[*work, 1, LAW.step_ns(work)] for work in works]
    path.write_text("\n".join(map(json.dumps, [head, *rows])) + "\n")
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_fitted_cost_file_predicts_metrics_and_the_cause_of_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cost = tmp_path / "cost.json"
    traces = [str(write_trace(tmp_path / name)) for name in ("a", "b")]
    assert main(["simulate", "fit", *traces, "-o", str(cost)]) == 0
    capsys.readouterr()

    code = main(["simulate", "run", "--cost", str(cost), "--json", "--requests", "40", "--set", "max_waiting_tokens=5"])

    found = printed(capsys)
    assert code == 0
    assert found["note"] == ""
    assert found["metrics"]["output_tokens_per_s"] > 10
    assert found["bounded_by"] in ("budget", "ratio", "blocks", "users")


def test_pages_4_only_the_errors_of_the_predicted_model_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A busy machine is a note of the prediction; too large an error of another `quantize` value is none."""
    cost = tmp_path / "cost.json"
    traces = [str(write_trace(tmp_path / name, quantize)) for name, quantize in (("a", None), ("b", "int4"))]
    assert main(["simulate", "fit", *traces, "-o", str(cost)]) == 0
    content = json.loads(cost.read_text())
    errors = {"median": {"prefill": 0.4, "decode": 0.01}, "p90": {"prefill": 0.9, "decode": 0.02}}
    content["models"]["none"]["errors"] = {**errors, "spread": {"prefill": 0.4}, "sums": {"prefill": 0.05}}
    content["models"]["int4"]["errors"] = {**errors, "spread": {}}
    cost.write_text(json.dumps(content))
    run = ["simulate", "run", "--cost", str(cost), "--requests", "20"]
    capsys.readouterr()

    assert main(run) == 0
    busy = " ".join(capsys.readouterr().out.split())
    assert main([*run, "--set", "quantize=int4"]) == 3
    refused = capsys.readouterr().err

    assert "the machine was busy during the measurement: equal steps differ by 40% (prefill) in the median" in busy
    assert "not decided: the median error of held-out prefill is 40.0%, above 20%" in refused


def test_a_cost_model_written_by_hand_is_noted_as_not_measured(by_hand: str, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "run", "--cost", by_hand, *ROOM, "--json", "--requests", "20"]) == 0
    assert "not measured" in printed(capsys)["note"]


def test_a_run_directory_reads_like_a_measured_one(by_hand: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"

    main(["simulate", "run", "--cost", by_hand, *ROOM, "--json", "--out", str(out)])

    found, run = printed(capsys)["metrics"], load_run(out)
    summary = summarize(run)
    assert run.manifest.labels["simulated"] == "true"
    for name in ("output_tokens_per_s", "requests_per_s", "ttft_p95_ms", "tpot_mean_ms", "e2e_p95_ms"):
        assert metric_value(summary, name, is_open_loop=False) == pytest.approx(found[name], rel=0.02), name


def test_a_sweep_puts_the_best_first(by_hand: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    space = tmp_path / "space.toml"
    space.write_text(
        '[param]\nmax_batch_prefill_tokens = { type = "int", low = 1024, high = 8192, log = true }\n'
        "max_batch_size = { type = 'int', low = 1, high = 32 }\n"
    )
    out = tmp_path / "out"

    code = main(["simulate", "sweep", str(space), "--cost", by_hand, "--set", "max_batch_total_tokens=20000",
                 "--set", "max_batch_prefill_tokens=2048", "-n", "12", "--requests", "30", "--json",
                 "--out", str(out)])  # fmt: skip

    found = printed(capsys)
    assert code == 0
    speeds = [row["metrics"]["output_tokens_per_s"] for row in found["rows"]]
    assert found["configurations"] == 12
    assert speeds == sorted(speeds, reverse=True)
    assert list(read_parquet(out / "predictions.parquet")["output_tokens_per_s"])[: len(speeds)] == speeds
    page = (out / "report.md").read_text()
    assert re.search(r"\*\*Predicted, not measured\.\*\* Best: [\d,.]+ output tokens/s with ", page)
    assert "A prediction has no interval. The error of the cost model is unknown" in page
    assert "12 configurations" in page
    assert "not measured: the cost model was written by hand" in page


def test_a_sweep_puts_configurations_within_the_limits_first(
    by_hand: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    space = tmp_path / "space.toml"
    space.write_text(
        '[[objective.limit]]\nmetric = "tpot_mean_ms"\nmax = 12\n[objective]\nmaximize = "output_tokens_per_s"\n'
        "[param]\nmax_batch_size = { type = 'int', low = 1, high = 32 }\n"
    )

    main(["simulate", "sweep", str(space), "--cost", by_hand, *ROOM, "-n", "8", "--requests", "30", "--json"])

    met = [row["metrics"]["tpot_mean_ms"] <= 12 for row in printed(capsys)["rows"]]
    assert met == sorted(met, reverse=True)
    assert set(met) == {True, False}, "some keep the limit and some do not"
    assert False in met


def test_explain_prints_fractions_of_time_that_add_up(by_hand: str, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "explain", "--cost", by_hand, *ROOM, "--requests", "20", "--json"]) == 0

    found = printed(capsys)
    assert found["prefill_share"] + found["decode_share"] + found["idle_share"] == pytest.approx(1)


def test_simulation_V13_the_same_seed_gives_the_same_bytes(by_hand: str, tmp_path: Path):
    for name in ("a", "b"):
        main(["simulate", "run", "--cost", by_hand, *ROOM, "--requests", "20", "--out", str(tmp_path / name / "run")])

    for file in ("manifest.json", "requests.parquet"):
        assert (tmp_path / "a" / "run" / file).read_bytes() == (tmp_path / "b" / "run" / file).read_bytes()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "max_batch_total_tokens with --set"),
        ((*ROOM, "--set", "speculate=2"), "no `acceptance` of drafts"),
        ((*ROOM, "--set", "num_shard=2"), "`num_shard` is not simulated"),
        ((*ROOM, "--set", "quantize=fp8"), "`quantize` fp8 was not measured"),
        ((*ROOM, "--set", "x"), "KEY=VALUE"),
    ],
    ids=["no_server", "no_acceptance", "not_modelled", "not_measured", "usage"],
)
def test_configurations_that_cannot_be_predicted_are_refused(
    flags: tuple[str, ...], words: str, by_hand: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["simulate", "run", "--cost", by_hand, *flags]) == 2
    assert words in capsys.readouterr().err
