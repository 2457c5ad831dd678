"""A Deployment with probes and resources, and its Service, as YAML. Values are flow style, quoted as in JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.servers.autoscaling import Scaling, ScalingTexts, autoscaler_lines
from tuner.servers.exported_container import ExportedContainer
from tuner.servers.exported_text import GRACE_S, START_LIMIT_S, comment_lines, k8s_text


@dataclass(frozen=True, slots=True)
class DeploymentTexts:
    """The texts of the values that a chart takes from `values.yaml`. `replicas`: None if an autoscaler sets them."""

    name: str
    image: str
    words: str
    environment: str
    resources: str
    replicas: str | None


def words_json(words: Sequence[str]) -> str:
    """Arguments as a list."""
    return json.dumps([k8s_text(word) for word in words])


def environment_json(container: ExportedContainer) -> str:
    """Variables as a list."""
    return json.dumps([{"name": name, "value": k8s_text(value)} for name, value in container.environment.items()])


def k8s_manifest(container: ExportedContainer, scaling: Scaling | None = None) -> str:
    """The Deployment, the Service and the autoscaler of a container. Raises UsageError for an unknown server."""
    texts = DeploymentTexts(
        name=container.name,
        image=json.dumps(container.image),
        words=words_json(container.words),
        environment=environment_json(container),
        resources=json.dumps(container.resources),
        replicas="1" if scaling is None else None,
    )
    lines = [*comment_lines(container.comments), *deployment_lines(container, texts)]
    lines += ["---", *service_lines(container.name, container.port)]
    if scaling is not None:
        limits = ScalingTexts.of(container.name, scaling.limits, scaling.prometheus)
        lines += ["---", *autoscaler_lines(scaling.kind, container.name, limits)]
    return "\n".join(lines) + "\n"


def deployment_lines(container: ExportedContainer, texts: DeploymentTexts) -> list[str]:
    """The Deployment."""
    probe = f"httpGet: {{path: {json.dumps(container.ready)}, port: {container.port}}}"
    return [
        "apiVersion: apps/v1",
        "kind: Deployment",
        "metadata:",
        f"  name: {texts.name}",
        "spec:",
        *([] if texts.replicas is None else [f"  replicas: {texts.replicas}"]),
        f"  selector: {{matchLabels: {{app: {texts.name}}}}}",
        "  template:",
        f"    metadata: {{labels: {{app: {texts.name}}}}}",
        "    spec:",
        f"      terminationGracePeriodSeconds: {GRACE_S}",
        "      containers:",
        f"        - name: {container.name}",
        f"          image: {texts.image}",
        *([f"          command: {words_json(container.command)}"] if container.command else []),
        f"          args: {texts.words}",
        f"          env: {texts.environment}",
        f"          ports: [{{containerPort: {container.port}}}]",
        # Loading the weights takes minutes; until then the other probes do not run.
        f"          startupProbe: {{{probe}, periodSeconds: 5, failureThreshold: {START_LIMIT_S // 5}}}",
        f"          readinessProbe: {{{probe}, periodSeconds: 5}}",
        # A busy server answers late: it is restarted after a minute without an answer.
        f"          livenessProbe: {{{probe}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}}",
        # Requests arrive until all nodes know that the pod stops.
        '          lifecycle: {preStop: {exec: {command: ["sleep", "5"]}}}',
        f"          resources: {texts.resources}",
        "          volumeMounts: [{name: shm, mountPath: /dev/shm}, {name: data, mountPath: /data}]",
        "      volumes:",
        "        - {name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}",
        "        - {name: data, emptyDir: {}}",
    ]


def service_lines(name: str, port: int) -> list[str]:
    """The Service of the pods."""
    return [
        "apiVersion: v1",
        "kind: Service",
        "metadata:",
        f"  name: {name}",
        "spec:",
        f"  selector: {{app: {name}}}",
        f"  ports: [{{port: 80, targetPort: {port}}}]",
    ]
