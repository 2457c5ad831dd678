"""The time of requests outside the model's steps, from the files of a run."""

from pathlib import Path

import pandas as pd
import pytest

from tuner.simulator.fitting.client_cost import NO_COST, ClientCost, client_cost_of

MS = 1_000_000


def write_run(directory: Path, totals: dict[str, float]) -> Path:
    directory.mkdir()
    pd.DataFrame(
        {"status": ["ok", "ok", "http_5xx"], "t_sent_ns": [0, 10 * MS, 0], "t_end_ns": [110 * MS, 120 * MS, 900 * MS]}
    ).to_parquet(directory / "requests.parquet")
    rows = [
        {"t_s": t, "name": name, "labels": "", "value": t * value} for t in (0.0, 1.0) for name, value in totals.items()
    ]
    pd.DataFrame(rows).to_parquet(directory / "server_metrics.parquet")
    return directory


def test_client_cost_is_the_wait_beyond_the_servers_time(tmp_path: Path):
    totals = {
        "tgi_request_validation_duration_sum": 0.010,
        "tgi_request_queue_duration_sum": 0.020,
        "tgi_request_inference_duration_sum": 0.184,
        "tgi_request_duration_count": 2.0,
        "tgi_request_input_length_sum": 2000.0,
    }

    # 110 ms waited, 107 of them in the server; 10 ms of checking over 2,000 tokens.
    assert client_cost_of(write_run(tmp_path / "run", totals)) == ClientCost(3 * MS, 5_000)


def test_a_run_without_these_metrics_has_no_client_cost(tmp_path: Path):
    assert client_cost_of(write_run(tmp_path / "run", {"another_total": 1.0})) == NO_COST
    assert client_cost_of(tmp_path / "none") == NO_COST


@pytest.mark.parametrize(
    ("costs", "mean"),
    [
        ([], NO_COST),
        ([NO_COST, ClientCost(4, 2)], ClientCost(4, 2)),
        ([ClientCost(2, 2), ClientCost(4, 4)], ClientCost(3, 3)),
    ],
)
def test_only_known_costs_are_averaged(costs: list[ClientCost], mean: ClientCost):
    assert ClientCost.mean(costs) == mean
