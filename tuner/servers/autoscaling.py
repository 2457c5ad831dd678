"""Autoscalers of an exported deployment: replicas by the requests in the servers, with limits from a plan."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loadgen.errors import UsageError
from reports.metrics.server.server_metrics import SERVER_METRICS

# Seconds with fewer requests before a replica is stopped: its start takes minutes.
SCALE_DOWN_S = 600

Autoscaler = Literal["keda", "hpa"]


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """Numbers of replicas, and the mean requests of a replica, running and waiting, that its objectives allow."""

    min_replicas: int
    max_replicas: int
    requests_per_replica: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """An autoscaler with its limits. `prometheus`: the address of KEDA's source."""

    kind: Autoscaler
    limits: ScalingLimits
    prometheus: str


@dataclass(frozen=True, slots=True)
class ScalingTexts:
    """The texts of an autoscaler's values: numbers, or places of a chart that take them from its `values.yaml`."""

    name: str
    min_replicas: str
    max_replicas: str
    threshold: str
    prometheus: str

    @classmethod
    def of(cls, name: str, limits: ScalingLimits, prometheus: str) -> "ScalingTexts":
        threshold = json.dumps(f"{limits.requests_per_replica:g}")
        return cls(name, str(limits.min_replicas), str(limits.max_replicas), threshold, json.dumps(prometheus))


def read_plan(path: Path) -> ScalingLimits:
    """The limits of a plan, from the output of `tgi-tune plan --json`. Raises UsageError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        replicas = [int(row["with_spare"]) for row in rows]
        requests = min(float(row["requests_per_replica"]) for row in rows)
    except OSError as error:
        raise UsageError(f"--plan {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"--plan {path} is not the output of `tgi-tune plan --json`") from None
    if not requests > 0:
        raise UsageError(f"--plan {path}: requests_per_replica is {requests:g}, but must be above 0")
    return ScalingLimits(min(replicas), max(replicas), requests)


def autoscaler_lines(kind: Autoscaler, server: str, texts: ScalingTexts) -> list[str]:
    """The autoscaler of the Deployment `texts.name` of a server. Raises UsageError for one without known gauges."""
    return {"keda": _scaled_object, "hpa": _horizontal_pod_autoscaler}[kind](gauges(server), texts)


def gauges(server: str) -> Sequence[str]:
    """The gauges of waiting and of running requests of a server. Raises UsageError."""
    series: Mapping[str, Any] = {metric.name: metric.series for metric in SERVER_METRICS}
    found = [each for metric in ("queue_size", "batch_size") for each in series[metric] if each.startswith(server)]
    if len(found) != 2:
        raise UsageError(f"--plan: {server} has no known gauges of waiting and running requests")
    return found


def _scaled_object(series: Sequence[str], texts: ScalingTexts) -> list[str]:
    query = " + ".join(f"sum({each})" for each in series)
    return [
        "# Replicas by the requests in the servers. Needs KEDA, and a Prometheus that scrapes the pods.",
        "apiVersion: keda.sh/v1alpha1",
        "kind: ScaledObject",
        "metadata:",
        f"  name: {texts.name}",
        "spec:",
        f"  scaleTargetRef: {{name: {texts.name}}}",
        f"  minReplicaCount: {texts.min_replicas}",
        f"  maxReplicaCount: {texts.max_replicas}",
        "  advanced:",
        "    horizontalPodAutoscalerConfig:",
        f"      behavior: {{scaleDown: {{stabilizationWindowSeconds: {SCALE_DOWN_S}}}}}",
        "  triggers:",
        "    - type: prometheus",
        "      metadata:",
        f"        serverAddress: {texts.prometheus}",
        f"        query: {json.dumps(query)}",
        f"        threshold: {texts.threshold}",
    ]


def _horizontal_pod_autoscaler(series: Sequence[str], texts: ScalingTexts) -> list[str]:
    return [
        "# Replicas by the waiting or the running requests of a pod, the larger of both. Needs an adapter that offers",
        "# these series of the pods as custom metrics (prometheus-adapter).",
        "apiVersion: autoscaling/v2",
        "kind: HorizontalPodAutoscaler",
        "metadata:",
        f"  name: {texts.name}",
        "spec:",
        f"  scaleTargetRef: {{apiVersion: apps/v1, kind: Deployment, name: {texts.name}}}",
        f"  minReplicas: {texts.min_replicas}",
        f"  maxReplicas: {texts.max_replicas}",
        f"  behavior: {{scaleDown: {{stabilizationWindowSeconds: {SCALE_DOWN_S}}}}}",
        "  metrics:",
        *(
            line
            for each in series
            for line in (
                "    - type: Pods",
                "      pods:",
                f"        metric: {{name: {json.dumps(each)}}}",
                f"        target: {{type: AverageValue, averageValue: {texts.threshold}}}",
            )
        ),
    ]
