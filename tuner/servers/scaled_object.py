"""A KEDA ScaledObject for an exported deployment: replicas by the requests in the servers, with limits from a plan."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError
from reports.metrics.server import SERVER_METRICS

# Seconds with fewer requests before a replica is stopped: its start takes minutes.
SCALE_DOWN_S = 600


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """Numbers of replicas, and the mean requests of a replica, running and waiting, that its objectives allow."""

    min_replicas: int
    max_replicas: int
    requests_per_replica: float


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


def scaled_object(name: str, limits: ScalingLimits, prometheus: str) -> str:
    """A YAML document, with the separator before it. Raises UsageError for a server without known gauges."""
    query = " + ".join(f"sum({series})" for series in _gauges(name))
    return "\n".join(
        [
            "---",
            f"# Replicas by the requests in the servers: {limits.requests_per_replica:g} for each replica in the plan.",
            f"# Needs KEDA, and a Prometheus at {prometheus} that scrapes the pods.",
            "apiVersion: keda.sh/v1alpha1",
            "kind: ScaledObject",
            "metadata:",
            f"  name: {name}",
            "spec:",
            f"  scaleTargetRef: {{name: {name}}}",
            f"  minReplicaCount: {limits.min_replicas}",
            f"  maxReplicaCount: {limits.max_replicas}",
            "  advanced:",
            "    horizontalPodAutoscalerConfig:",
            f"      behavior: {{scaleDown: {{stabilizationWindowSeconds: {SCALE_DOWN_S}}}}}",
            "  triggers:",
            "    - type: prometheus",
            "      metadata:",
            f"        serverAddress: {json.dumps(prometheus)}",
            f"        query: {json.dumps(query)}",
            f"        threshold: {json.dumps(f'{limits.requests_per_replica:g}')}",
            "",
        ]
    )


def _gauges(name: str) -> Sequence[str]:
    """The gauges of waiting and of running requests of a server."""
    series: Mapping[str, Any] = {metric.name: metric.series for metric in SERVER_METRICS}
    found = [each for metric in ("queue_size", "batch_size") for each in series[metric] if each.startswith(name)]
    if len(found) != 2:
        raise UsageError(f"--plan: {name} has no known gauges of waiting and running requests")
    return found
