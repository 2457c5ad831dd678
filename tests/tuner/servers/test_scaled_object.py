import json
from pathlib import Path

import pytest
import yaml

from loadgen.errors import UsageError
from tuner.servers.scaled_object import ScalingLimits, read_plan, scaled_object

LIMITS = ScalingLimits(2, 9, 12.5)
PROMETHEUS = "http://prometheus:9090"


def plan_file(folder: Path, *rows: dict[str, object]) -> Path:
    file = folder / "plan.json"
    file.write_text(json.dumps({"note": "", "rows": rows}))
    return file


def test_the_limits_are_those_of_the_smallest_and_the_largest_fleet_and_of_the_fullest_that_all_allow(tmp_path: Path):
    file = plan_file(
        tmp_path,
        {"rate": 5, "replicas": 1, "with_spare": 2, "requests_per_replica": 20.0},
        {"rate": 80, "replicas": 8, "with_spare": 9, "requests_per_replica": 12.5},
    )

    assert read_plan(file) == LIMITS


@pytest.mark.parametrize("text", ["[]", "{", '{"rows": [{"replicas": 1}]}', '{"rows": []}'])
def test_another_file_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "plan.json"
    file.write_text(text)

    with pytest.raises(UsageError, match="is not the output of `tgi-tune plan --json`"):
        read_plan(file)


def test_a_missing_plan_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="No such file"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("tgi", "sum(tgi_queue_size) + sum(tgi_batch_current_size)"),
        ("vllm", "sum(vllm:num_requests_waiting) + sum(vllm:num_requests_running)"),
        ("sglang", "sum(sglang:num_queue_reqs) + sum(sglang:num_running_reqs)"),
        ("llamacpp", "sum(llamacpp:requests_deferred) + sum(llamacpp:requests_processing)"),
    ],
)
def test_the_object_scales_the_deployment_by_the_requests_in_its_servers(name: str, query: str):
    [content] = yaml.safe_load_all(scaled_object(name, LIMITS, PROMETHEUS))

    assert (content["kind"], content["spec"]["scaleTargetRef"]) == ("ScaledObject", {"name": name})
    assert (content["spec"]["minReplicaCount"], content["spec"]["maxReplicaCount"]) == (2, 9)
    [trigger] = content["spec"]["triggers"]
    assert trigger["metadata"] == {"serverAddress": PROMETHEUS, "query": query, "threshold": "12.5"}


def test_a_server_without_known_gauges_is_refused():
    with pytest.raises(UsageError, match="mine has no known gauges"):
        scaled_object("mine", LIMITS, PROMETHEUS)
