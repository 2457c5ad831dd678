"""A Helm chart of an exported container: every setting in `values.yaml`, templates that only insert values."""

import json
from collections.abc import Mapping

from tuner.servers.autoscaling import Scaling, ScalingTexts, autoscaler_lines
from tuner.servers.exported_container import ExportedContainer
from tuner.servers.exported_text import comment_lines
from tuner.servers.k8s_manifest import (
    DeploymentTexts,
    deployment_lines,
    environment_json,
    service_lines,
    words_json,
)

CHART_VERSION = "0.1.0"
NAME = "{{ .Release.Name }}"


def helm_chart(container: ExportedContainer, scaling: Scaling | None) -> Mapping[str, str]:
    """The files of the chart by their path. Raises UsageError for an autoscaler of an unknown server."""
    values = {
        "image": json.dumps(container.image),
        "args": words_json(container.words),
        "env": environment_json(container),
        "resources": json.dumps(container.resources),
    }
    texts = DeploymentTexts(
        name=NAME,
        image=_value("image"),
        words=_value("args"),
        environment=_value("env"),
        resources=_value("resources"),
        replicas=_value("replicas") if scaling is None else None,
    )
    templates = {
        "deployment": deployment_lines(container, texts),
        "service": service_lines(NAME, container.port),
    }
    if scaling is None:
        values["replicas"] = "1"
    else:
        limits = ScalingTexts.of(container.name, scaling.limits, scaling.prometheus)
        values |= {
            "minReplicas": limits.min_replicas,
            "maxReplicas": limits.max_replicas,
            "requestsPerReplica": limits.threshold,
        }
        if scaling.kind == "keda":
            values["prometheus"] = limits.prometheus
        places = ScalingTexts(
            NAME, _value("minReplicas"), _value("maxReplicas"), _value("requestsPerReplica"), _value("prometheus")
        )
        templates["autoscaler"] = autoscaler_lines(scaling.kind, container.name, places)
    return {
        "Chart.yaml": _lines(_chart_lines(container)),
        "values.yaml": _lines(
            [*comment_lines(container.comments), *(f"{name}: {text}" for name, text in values.items())]
        ),
        **{f"templates/{name}.yaml": _lines(lines) for name, lines in templates.items()},
    }


def _chart_lines(container: ExportedContainer) -> list[str]:
    return [
        "apiVersion: v2",
        f"name: {container.name}",
        f"description: {json.dumps(f'{container.name} with the settings of a study')}",
        "type: application",
        f"version: {CHART_VERSION}",
    ]


def _value(name: str) -> str:
    return f"{{{{ toJson .Values.{name} }}}}"


def _lines(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
