import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadgen.errors import UsageError
from tests.support.kubernetes import check_manifest
from tuner.servers.autoscaling import Autoscaler, ScalingLimits, ScalingTexts, autoscaler_lines, read_plan

LIMITS = ScalingLimits(2, 9, 12.5)
PROMETHEUS = "http://prometheus:9090"


def rendered(kind: Autoscaler, name: str) -> Any:
    return yaml.safe_load("\n".join(autoscaler_lines(kind, name, ScalingTexts.of(name, LIMITS, PROMETHEUS))))


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
    content = rendered("keda", name)

    assert (content["kind"], content["spec"]["scaleTargetRef"]) == ("ScaledObject", {"name": name})
    assert (content["spec"]["minReplicaCount"], content["spec"]["maxReplicaCount"]) == (2, 9)
    [trigger] = content["spec"]["triggers"]
    assert trigger["metadata"] == {"serverAddress": PROMETHEUS, "query": query, "threshold": "12.5"}


def test_a_server_without_known_gauges_is_refused():
    with pytest.raises(UsageError, match="mine has no known gauges"):
        rendered("keda", "mine")


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("tgi", {"tgi_queue_size", "tgi_batch_current_size"}),
        ("vllm", {"vllm:num_requests_waiting", "vllm:num_requests_running"}),
    ],
)
def test_the_plain_autoscaler_has_the_limits_of_the_plan_and_the_published_schema(name: str, series: set[str]):
    content = rendered("hpa", name)

    check_manifest(content)
    assert content["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    assert (content["spec"]["minReplicas"], content["spec"]["maxReplicas"]) == (2, 9)
    pods = [metric["pods"] for metric in content["spec"]["metrics"]]
    assert {each["metric"]["name"] for each in pods} == series
    assert [each["target"] for each in pods] == [{"type": "AverageValue", "averageValue": "12.5"}] * 2
