"""Runs of other load generators, read into our reports, sweep pages and gate.

`vllm_bench_*.json` were recorded with `vllm bench serve` 0.32 on a scripted server: first token after 20 ms, 5 ms
between tokens. `guidellm_concurrency_4.json` and `aiperf_concurrency_4.jsonl` were recorded with guidellm 0.8.1 and
aiperf 0.13.0 on llama-server: 24 requests of 128 prompt and 32 output tokens each. Prompts, outputs and unused metrics
were removed. Other files of these two are synthesized from their published schemas.
"""

import json
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.commands.import_runs import read_file
from loadgen.errors import UsageError
from loadgen.gate.sides import read_side
from loadgen.gate.stored_sides import stored_runs
from loadgen.imports.imported_run import ImportedLoad
from reports.run_schema import TokensSource
from reports.saved_run import load_run
from tests.support.samples.imported_files import aiperf_rows, guidellm_report

SAMPLES = Path(__file__).resolve().parents[2] / "support" / "samples" / "imported"
GUIDELLM, AIPERF = SAMPLES / "guidellm_concurrency_4.json", SAMPLES / "aiperf_concurrency_4.jsonl"
CLOSED, OPEN = SAMPLES / "vllm_bench_concurrency_2.json", SAMPLES / "vllm_bench_rate_20.json"


def written(path, value):
    text = "\n".join(map(json.dumps, value)) if isinstance(value, list) else json.dumps(value)
    path.write_text(text)
    return path


def test_servers_6_a_recorded_file_of_vllm_bench_has_the_times_that_vllm_reports(tmp_path, capsys):
    main(["import", str(CLOSED), "--out", str(tmp_path), "--json"])

    printed = capsys.readouterr()
    summary, own = json.loads(printed.out), json.loads(CLOSED.read_text())
    records = load_run(tmp_path / "concurrency-2").records
    assert len(records) == own["completed"] == 8
    assert sum(record.output_tokens for record in records) == own["total_output_tokens"]
    assert sum(record.input_tokens for record in records) == own["total_input_tokens"]
    assert summary["metrics"]["ttft_s"]["mean"] == pytest.approx(own["mean_ttft_ms"] / 1e3)
    assert summary["metrics"]["tpot_s"]["mean"] == pytest.approx(own["mean_tpot_ms"] / 1e3, rel=0.05)
    assert summary["metrics"]["gap_s"]["mean"] == pytest.approx(own["mean_itl_ms"] / 1e3)
    assert summary["metrics"]["ttft_s"]["min"] >= 0.02
    assert summary["counts"]["ok"] == 8
    assert summary["rates"]["concurrency_max"]["value"] <= 2
    assert "imported from vllm bench serve" in [each["message"] for each in summary["verdict"]["findings"]]
    assert "not in the file: the server's own metrics" in printed.err


def test_servers_6_an_open_loop_of_vllm_bench_counts_from_the_arrival(tmp_path):
    [found] = read_file(OPEN, None)

    found.write(tmp_path / "r", OPEN)

    manifest, own = load_run(tmp_path / "r").manifest, json.loads(OPEN.read_text())
    assert (manifest.mode, manifest.config["rate"], manifest.is_open_loop) == ("poisson", 20.0, True)
    waits = [(record.t_sent_ns - record.t_intended_ns) / 1e9 for record in load_run(tmp_path / "r").records]
    assert sorted(waits) == pytest.approx(sorted(own["queue_times"]), abs=1e-6)


def test_servers_6_a_file_of_vllm_bench_with_totals_only_is_refused_with_the_flag_to_add(tmp_path):
    own = json.loads(CLOSED.read_text())
    totals = {name: value for name, value in own.items() if not isinstance(value, list)}

    with pytest.raises(UsageError, match=r"totals only .* --save-detailed"):
        read_file(written(tmp_path / "totals.json", totals), None)


def imported(path, folder, capsys, *words):
    """The summary of a recorded file, and the records that were written."""
    main(["import", str(path), "--out", str(folder), "--json", *words])
    summary = json.loads(capsys.readouterr().out)
    return summary, load_run(folder / "concurrency-4").records


def test_servers_6_a_recorded_file_of_guidellm_has_the_numbers_that_guidellm_reports(tmp_path, capsys):
    summary, records = imported(GUIDELLM, tmp_path, capsys)

    own = json.loads(GUIDELLM.read_text())["benchmarks"][0]["metrics"]
    assert [(each.input_tokens, each.output_tokens, each.cached_input_tokens) for each in records] == [
        (128, 32, 0)
    ] * 24
    assert summary["metrics"]["ttft_s"]["mean"] == pytest.approx(
        own["time_to_first_token_ms"]["successful"]["mean"] / 1e3
    )
    # guidellm's latency ends with the response, ours with its last token.
    assert summary["metrics"]["e2e_s"]["mean"] == pytest.approx(own["request_latency"]["successful"]["mean"], rel=0.01)
    rate = summary["rates"]["output_tokens_per_s"]["value"]
    assert rate == pytest.approx(own["output_tokens_per_second"]["successful"]["mean"], rel=1e-3)
    assert summary["window"]["stop_reason"] == "guidellm"


def test_servers_6_a_recorded_file_of_aiperf_counts_the_tokens_of_the_server(tmp_path, capsys):
    """Its own counts are 127 tokens of each prompt, and 31 of one output."""
    summary, records = imported(AIPERF, tmp_path, capsys, "--concurrency", "4")

    assert [(each.input_tokens, each.output_tokens, each.cached_input_tokens) for each in records] == [
        (128, 32, 0)
    ] * 24
    assert {each.tokens_source for each in records} == {TokensSource.SERVER_USAGE}
    # The values that aiperf reports for this run.
    assert summary["metrics"]["ttft_s"]["mean"] == pytest.approx(0.18418269)
    assert summary["metrics"]["e2e_s"]["mean"] == pytest.approx(0.3067897, rel=0.05)


def test_servers_6_the_benchmarks_of_guidellm_become_a_sweep_page(tmp_path, capsys):
    file = written(tmp_path / "benchmarks.json", guidellm_report())

    main(["import", str(file), "--out", str(tmp_path / "o"), "--json"])

    printed = capsys.readouterr()
    points = json.loads(printed.out)["points"]
    assert [point["load"] for point in points] == [1.0, 2.0]
    for point in points:
        assert point["metrics"]["ttft_p50_ms"] == pytest.approx(50, rel=1e-4)
        assert point["metrics"]["tpot_p50_ms"] == pytest.approx(10, rel=1e-4)
        assert point["metrics"]["output_tokens_per_s"] == pytest.approx(9 / 0.14 * point["load"], rel=0.05)
    assert "no gaps and no ITL" in printed.err
    assert "Sweep over concurrency" in (tmp_path / "o" / "report.html").read_text()


def test_servers_6_a_report_of_guidellm_with_a_sample_of_its_requests_is_refused(tmp_path):
    with pytest.raises(UsageError, match="keeps 40 of 55 requests"):
        read_file(written(tmp_path / "b.json", guidellm_report(made=55)), None)


@pytest.mark.parametrize("gaps", [True, False])
def test_servers_6_records_of_aiperf_keep_phases_gaps_and_failures(gaps, tmp_path):
    [found] = read_file(
        written(tmp_path / "profile_export.jsonl", aiperf_rows(gaps=gaps)), ImportedLoad(rate=10.0, mode="poisson")
    )

    found.write(tmp_path / "r", tmp_path / "profile_export.jsonl")

    run = load_run(tmp_path / "r")
    measured = [record for record in run.records if record.phase == "measure"]
    assert len(measured) == 30
    assert sum(record.status == "http_5xx" for record in measured) == 3
    complete = next(record for record in measured if record.status == "ok")
    assert (complete.t_first_ns - complete.t_sent_ns, complete.t_last_ns - complete.t_first_ns) == (
        40_000_000,
        32_000_000,
    )
    assert complete.gap_ns == ([8_000_000] * 4 if gaps else [])
    assert complete.t_sent_ns - complete.t_intended_ns == 1_000_000
    assert any("no ITL" in each for each in run.manifest.target["imported"]["lacks"]) is not gaps


@pytest.mark.parametrize(
    ("value", "load", "message"),
    [
        (aiperf_rows(), None, "do not state their load; give --concurrency or --rate"),
        (aiperf_rows(unit="parsecs"), ImportedLoad(concurrency=1), r"profile:2: a time has the unit 'parsecs'|unit"),
        ({"aiperf_version": "0.13.0", "request_count": {}}, None, "totals only"),
        ({"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": [{}]}, None, "not as its tool writes it"),
        ({"hello": 1}, None, "not a result of vllm bench serve, guidellm"),
        ([1, 2], None, "it holds no JSON objects"),
    ],
)
def test_servers_6_files_that_cannot_be_read_are_refused_by_name(value, load, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        read_file(written(tmp_path / "profile", value), load)


def test_servers_6_imported_runs_are_sides_of_the_gate(tmp_path):
    [found] = read_file(CLOSED, None)
    found.write(tmp_path / "r", CLOSED)

    [side] = stored_runs(read_side("a", f"stored:{tmp_path / 'r'}", None), ["ttft_p50_ms", "error_rate"], tmp_path)

    own = json.loads(CLOSED.read_text())
    assert side.values["ttft_p50_ms"] == pytest.approx(own["median_ttft_ms"])
    assert side.values["error_rate"] == 0
