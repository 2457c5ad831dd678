"""`tgi-bench run --url` with no other setting of the target against real servers on their defaults."""

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.runner import measure
from loadgen.target.target import Target
from reports.metrics.summary import Analysis
from tests.support.measured_requests import measured
from tests.support.servers.programs.real_peers import llama_server, vllm

pytestmark = pytest.mark.slow
LOAD = BenchConfig(concurrency=2, requests=12, input_tokens="100", output_tokens="24")


def measured_at(url, folder, config=LOAD):
    """The summary and the records of a run against a URL."""
    result = measure(config, Target(url), folder)
    records = measured(result)
    assert [record.status for record in records] == ["ok"] * 12
    assert {record.output_tokens for record in records} == {24}
    assert len({record.input_tokens for record in records}) == 1
    assert 100 <= records[0].input_tokens <= 130
    assert result.manifest.target["prompt_length_error"] == 0
    summary = Analysis.of(result).summary
    assert "answer_length" not in {finding["check"] for finding in summary["verdict"]["findings"]}
    assert summary["cached"]["measured"] is not None
    return result, summary


def test_vllm_is_measured_with_forced_lengths_cached_share_and_server_metrics(tmp_path):
    with vllm(tmp_path) as target:
        for number, url in enumerate((target.url, f"{target.url}/v1")):
            result, summary = measured_at(url, tmp_path / f"r{number}")

            assert (result.manifest.target["engine"], result.manifest.length_control) == ("vllm", "forced")
            # Both servers count the tokens of a request after its response: the last scrape may miss the last requests.
            assert summary["server"]["output_tokens"]["change"] >= 8 * 24
            assert {"queue_s", "prefill_s", "ttft_s", "gap_s"} <= summary["server"].keys()
        shared = LOAD.model_copy(update={"workload": "shared_prefix", "prefix_tokens": 384, "prefix_groups": 1})
        cached = Analysis.of(measure(shared, target, tmp_path / "shared")).summary["cached"]
        assert cached["measured"] == pytest.approx(cached["planned"], abs=0.1)


def test_llama_server_is_measured_with_forced_lengths_and_cached_share(tmp_path):
    with llama_server(tmp_path) as target:
        for number, url in enumerate((target.url, f"{target.url}/v1")):
            result, _ = measured_at(url, tmp_path / f"r{number}")

            assert (result.manifest.target["engine"], result.manifest.length_control) == ("llamacpp", "forced")
            assert result.manifest.target["server_metrics"] == "none; start llama.cpp with --metrics"


def test_llama_server_reports_its_metrics_and_empties_its_cache(tmp_path):
    flags = ("--metrics", "--slot-save-path", str(tmp_path), "--cache-ram", "0")
    with llama_server(tmp_path, *flags) as target:
        result, summary = measured_at(target.url, tmp_path / "r", LOAD.model_copy(update={"reset_cache": True}))

    assert result.manifest.target["cache_reset"].startswith("confirmed: ")
    assert summary["server"]["output_tokens"]["change"] >= 8 * 24
    assert "prefix_hits" in summary["server"]
