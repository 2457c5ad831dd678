import json
from pathlib import Path

import pytest

from reference_server.benchmark.results import BenchmarkResult, StepSummary, average_text, table
from reference_server.benchmark.steps import BatchTimes


def result() -> BenchmarkResult:
    """Two runs of batches of 2 prompts of 10 tokens: prefill 10 and 30 ms, 4 decode steps of 5 and 15 ms."""
    batches = [BatchTimes(2, 20, 0.010, 0.020, 4, 8), BatchTimes(2, 20, 0.030, 0.060, 4, 8)]
    return BenchmarkResult("a/model", {"sequence_length": 10}, {"block_size": 16}, {2: batches}, {"python": "3.11"})


def test_latencies_are_in_ms_by_tgis_steps():
    averages = {each.step: each.average for each in result().latencies()}

    assert averages == pytest.approx({"Prefill": 20, "Decode (token)": 10, "Decode (total)": 40})


def test_throughputs_count_generated_tokens_and_the_tokens_of_prompts():
    highest = {each.step: each.highest for each in result().throughputs()}

    assert highest == pytest.approx({"Prefill": 200, "Prefill (prompt)": 2000, "Decode": 400})


def test_the_interval_of_an_average_is_students():
    summary = StepSummary.of("Prefill", 1, [8.0, 10.0, 12.0])

    assert (summary.average, summary.half_interval) == (10.0, pytest.approx(4.303 * 2 / 3**0.5, rel=1e-3))
    assert average_text(summary) == "10.0 ± 4.97"


@pytest.mark.parametrize(
    ("runs", "p90", "p99"), [(9, None, None), (10, 8.1, None), (99, 88.2, None), (100, 89.1, 98.01)]
)
def test_a_percentile_needs_runs_beyond_it(runs: int, p90: float | None, p99: float | None):
    summary = StepSummary.of("Prefill", 1, [float(value) for value in range(runs)])

    assert (summary.p90, summary.p99) == (pytest.approx(p90), pytest.approx(p99))


def test_one_run_has_no_interval():
    assert average_text(StepSummary.of("Prefill", 1, [8.0])) == "8.00"


def test_the_tables_of_the_terminal_fit_80_columns():
    lines = result().render().splitlines()

    assert max(len(line) for line in lines) <= 80
    assert "| Decode (token) |     2 | 10.0 ± 63.5 |   5.00 |    15.0 | 10.0 |   – |   – |" in lines


def test_columns_are_aligned():
    assert table(("a", "bcd"), [("long", "1")]) == "| a    | bcd |\n|------|-----|\n| long |   1 |"


def test_the_json_has_every_batch_and_the_statistics(tmp_path: Path):
    result().write_json(tmp_path / "steps.json")

    content = json.loads((tmp_path / "steps.json").read_text())
    assert content["batches"][1] == {
        "size": 2,
        "prompt_tokens": 20,
        "prefill_s": 0.03,
        "decode_s": 0.06,
        "decode_steps": 4,
        "decode_tokens": 8,
    }
    assert [each["step"] for each in content["latency_ms"]] == ["Prefill", "Decode (token)", "Decode (total)"]
    assert (content["model"], content["shard"], content["versions"]) == (
        "a/model",
        {"block_size": 16},
        {"python": "3.11"},
    )
