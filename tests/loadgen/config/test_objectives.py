import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.config.objectives import objectives_of, parse_objective
from loadgen.errors import UsageError
from loadgen.runner import measure
from loadgen.target.target import Target
from reports.metrics.summary import summarize
from tests.support.servers.stream_server import Script, ServerState, stream_server


def test_an_objective_is_a_metric_and_a_bound():
    assert parse_objective("ttft_p95_ms < 500") == {"metric": "ttft_p95_ms", "max": 500.0}
    assert parse_objective("decode_tps>=20") == {"metric": "decode_tps", "min": 20.0}
    with pytest.raises(ValueError, match="is not an objective"):
        parse_objective("fast")


def test_a_metric_that_a_single_request_does_not_have_is_refused():
    with pytest.raises(UsageError, match="'gap_p99_ms', which is not a metric of a single request"):
        objectives_of(["gap_p99_ms < 20"])


@pytest.mark.parametrize(("written", "meant"), [("ttft_p95", "ttft_p95_ms"), ("tpto_mean_ms", "tpot_mean_ms")])
def test_pages_2_a_mistyped_metric_of_an_objective_is_refused_with_the_nearest(written, meant):
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        objectives_of([f"{written} < 500"])


def test_metrics_7_objectives_and_price_become_goodput_attainment_and_cost(tmp_path):
    """Every third answer starts late: two thirds of the requests meet the objective."""
    starts = iter(range(1_000))
    state = ServerState(script=lambda body: Script(first_s=0.4 if next(starts) % 3 == 0 else 0.0))
    config = BenchConfig(
        concurrency=1, requests=12, input_tokens="8", output_tokens="2", slo=("ttft_p95_ms < 200",), cost_per_hour=3.6
    )

    with stream_server(state) as (url, _):
        result = measure(config, Target(url), tmp_path / "r")

    summary = summarize(result)
    assert result.manifest.objectives == [{"metric": "ttft_p95_ms", "max": 200.0}]
    assert summary["slo"]["first_violated"] == {"ttft_p95_ms": 4}
    assert summary["slo"]["attainment"]["value"] == pytest.approx(8 / 12)
    assert summary["slo"]["goodput_rps"] == pytest.approx(8 / summary["window"]["end_s"], rel=0.2)
    assert summary["rates"]["cost_per_mtok"]["value"] == pytest.approx(
        3.6 / 3600 / summary["rates"]["output_tokens_per_s"]["value"] * 1e6
    )
