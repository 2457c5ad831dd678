"""The Helm chart of an export: its templates with the values of `values.yaml` are the objects of `--as k8s`.

The templates only insert values, so the test can insert them as Helm does; there is no `helm` among the test tools.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.support.kubernetes import check_manifest
from tuner.config import ServerSection
from tuner.servers.autoscaling import Scaling, ScalingLimits
from tuner.servers.exported_container import GIB, ExportedContainer, ModelMemory
from tuner.servers.helm_chart import helm_chart
from tuner.servers.k8s_manifest import k8s_manifest
from tuner.servers.select import server_of
from tuner.servers.tgi.export import container_of

RELEASE = "tgi"
PROMETHEUS = "http://prometheus:9090"
LIMITS = ScalingLimits(2, 9, 12.5)
SETTINGS = {"model_id": "org/m", "revision": "$(HF_TOKEN) {{ .Values.image }}", "num_shard": 2, "max_total_tokens": 512}
CONTAINER = container_of(SETTINGS, ["found"], "tgi:3", memory=ModelMemory(15 * GIB))


def inserted(files: Mapping[str, str]) -> list[Any]:
    """The objects of a chart. Raises KeyError for a template that does more than insert a value."""
    values = yaml.safe_load(files["values.yaml"])
    places: dict[str, str] = {f"toJson .Values.{name}": json.dumps(value) for name, value in values.items()}
    places[".Release.Name"] = RELEASE
    texts = [text for path, text in files.items() if path.startswith("templates/")]
    return [yaml.safe_load(re.sub(r"{{(.*?)}}", lambda match: places[match[1].strip()], text)) for text in texts]


@pytest.mark.parametrize("kind", ["keda", "hpa", None])
def test_a_chart_has_the_objects_of_the_manifest(kind: Any):
    scaling = None if kind is None else Scaling(kind, LIMITS, PROMETHEUS)

    objects = inserted(helm_chart(CONTAINER, scaling))

    assert objects == list(yaml.safe_load_all(k8s_manifest(CONTAINER, scaling)))
    autoscalers = {"keda": ["ScaledObject"], "hpa": ["HorizontalPodAutoscaler"], None: []}
    assert [each["kind"] for each in objects] == ["Deployment", "Service", *autoscalers[kind]]
    for each in objects:
        if each["kind"] != "ScaledObject":
            check_manifest(each)


def test_a_chart_names_its_server_and_every_value_is_used():
    files = helm_chart(CONTAINER, Scaling("keda", LIMITS, PROMETHEUS))
    chart, values = yaml.safe_load(files["Chart.yaml"]), yaml.safe_load(files["values.yaml"])

    assert (chart["apiVersion"], chart["name"], chart["type"]) == ("v2", "tgi", "application")
    assert re.fullmatch(r"\d+\.\d+\.\d+", chart["version"])
    templates = "".join(text for path, text in files.items() if path.startswith("templates/"))
    assert set(re.findall(r"\.Values\.(\w+)", templates)) == set(values)
    assert "# found" in files["values.yaml"]


def test_an_autoscaler_sets_the_replicas_and_without_one_the_chart_does():
    scaled, *_ = inserted(helm_chart(CONTAINER, Scaling("hpa", LIMITS, PROMETHEUS)))
    fixed, *_ = inserted(helm_chart(CONTAINER, None))

    assert "replicas" not in scaled["spec"]
    assert fixed["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("gpus", "memory", "resources"),
    [
        (
            2,
            ModelMemory(15 * GIB),
            {"requests": {"cpu": 6, "memory": "8Gi"}, "limits": {"nvidia.com/gpu": 2, "memory": "23Gi"}},
        ),
        (0, ModelMemory(2 * GIB, GIB // 2), {"requests": {"memory": "7Gi"}, "limits": {"memory": "7Gi"}}),
        (1, None, {"requests": {"cpu": 4}, "limits": {"nvidia.com/gpu": 1}}),
        (0, None, {}),
    ],
)
def test_the_resources_are_those_of_the_gpus_and_of_the_model(gpus: int, memory: Any, resources: Any):
    assert ExportedContainer("m", "m:1", (), {}, (), gpus=gpus, memory=memory).resources == resources


def test_the_memory_is_computed_from_a_config_on_this_machine(tmp_path: Any):
    # 1.10 B parameters at two bytes, and K/V of 2 x 22 layers x 4 heads x 64 at two bytes for each token.
    config = {
        **{"model_type": "llama", "num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = server_of(ServerSection(kind="tgi-launcher", model_id=str(tmp_path)))

    container = server.container({"model_id": str(tmp_path), "max_batch_total_tokens": 100_000}, [], "tgi:3")

    assert container.gpus == 0
    assert container.memory is not None
    assert container.memory.weight_bytes == pytest.approx(2.2e9, rel=0.01)
    assert container.memory.kv_bytes == 100_000 * 2 * 22 * 4 * 64 * 2


def test_a_profile_has_a_chart_too():
    server = server_of(ServerSection(profile="vllm", model_id="org/m", gpus=(0, 1)))

    deployment, service = inserted(helm_chart(server.container({"model_id": "org/m"}, []), None))

    check_manifest(deployment)
    check_manifest(service)
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
