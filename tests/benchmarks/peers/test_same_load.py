"""One load by several load generators: their files, the table, and a whole run of ours."""

import json

import pytest

from benchmarks.peers.same_load import TOOLS, main, table
from tests.support.servers.stream_server import ServerState, stream_server

READ = {tool.name: tool.read for tool in TOOLS}


def test_the_result_of_vllm_bench_is_read(tmp_path):
    found = {
        "output_throughput": 80.0,
        "p50_ttft_ms": 20.0,
        "p95_ttft_ms": 40.0,
        "mean_tpot_ms": 5.0,
        "total_input_tokens": 320,
        "total_output_tokens": 80,
        "completed": 10,
        "failed": 1,
    }
    (tmp_path / "vllm.json").write_text(json.dumps(found))

    reported = READ["vllm"](tmp_path)

    assert (reported.output_tokens_per_s, reported.ttft_p95_ms, reported.tpot_mean_ms) == (80.0, 40.0, 5.0)
    assert (reported.input_tokens, reported.output_tokens, reported.failed) == (32.0, 8.0, 1)


def test_the_result_of_guidellm_is_read(tmp_path):
    def succeeded(mean, **percentiles):
        return {"successful": {"mean": mean, "percentiles": percentiles}, "errored": {"mean": 0.0}}

    metrics = {
        "output_tokens_per_second": succeeded(80.0),
        "time_to_first_token_ms": succeeded(25.0, p50=20.0, p95=40.0),
        "inter_token_latency_ms": succeeded(5.0),
        "prompt_token_count": succeeded(32.0),
        "output_token_count": succeeded(8.0),
        "request_totals": {"successful": 10, "errored": 2},
    }
    (tmp_path / "guidellm.json").write_text(json.dumps({"benchmarks": [{"metrics": metrics}]}))

    reported = READ["guidellm"](tmp_path)

    assert (reported.ttft_p50_ms, reported.ttft_p95_ms, reported.tpot_mean_ms) == (20.0, 40.0, 5.0)
    assert (reported.input_tokens, reported.output_tokens, reported.failed) == (32.0, 8.0, 2)


def test_the_table_has_the_median_and_the_range_of_each_tool():
    numbers = dict.fromkeys(
        ("ttft_p50_ms", "ttft_p95_ms", "tpot_mean_ms", "input_tokens", "output_tokens", "failed"), 8
    )
    runs = [{"tool": "a", "output_tokens_per_s": rate, **numbers} for rate in (10.0, 14.0, 11.0)]

    row = table(runs)[2]

    assert "| a | 3 | 11 (10–14) | 8 | 8 |" in row


@pytest.mark.slow
def test_our_runs_have_exact_lengths_and_the_warm_up_round_is_left_out(tmp_path, capsys):
    words = ["--requests", "4", "--users", "2", "--input-tokens", "16", "--output-tokens", "4", "--rounds", "1"]
    with stream_server(ServerState(has_info=False, owner="vllm")) as (url, _):
        code = main(["--url", url, "--model", "m", "--tokenizer", ".", *words, "--out", str(tmp_path / "runs")])

    assert code == 0
    runs = json.loads((tmp_path / "runs" / "runs.json").read_text())
    assert [(run["round"], run["tool"], run["output_tokens"], run["failed"]) for run in runs] == [
        (0, "tgi-bench", 4.0, 0.0),
        (1, "tgi-bench", 4.0, 0.0),
    ]
    assert "| tgi-bench | 1 |" in capsys.readouterr().out
