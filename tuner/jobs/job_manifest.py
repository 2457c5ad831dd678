"""A Kubernetes Job whose pods run one command of this package side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.servers.exported_text import k8s_text

# User id in this repository's container images, and the folder that this user can write to.
USER, FOLDER = 1000, "/data"
HOSTNAME_LABEL = "kubernetes.io/hostname"


@dataclass(frozen=True, slots=True)
class SecretVariable:
    """An environment variable whose value is the key of its name in a Secret."""

    name: str
    secret: str

    @property
    def source(self) -> dict[str, Any]:
        return {"name": self.name, "valueFrom": {"secretKeyRef": {"name": self.secret, "key": self.name}}}


@dataclass(frozen=True, slots=True)
class JobManifest:
    """`pods` pods that run one command. Failed pods are restarted, up to `retries` times in total.

    apart_from: names of Jobs whose pods must run on other nodes. volumes: Kubernetes volume sources, by mount path.
    """

    name: str
    image: str
    command: Sequence[str]
    pods: int = 1
    retries: int = 0
    variables: Sequence[SecretVariable] = ()
    cpus: str = "1"
    gpus: int = 0
    apart_from: Sequence[str] = ()
    volumes: Mapping[str, Mapping[str, Any]] | None = None
    ports: Sequence[int] = ()

    def content(self) -> dict[str, Any]:
        """The manifest as plain values."""
        template = {
            "metadata": {"labels": {"app": self.name}},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
                **({"affinity": _apart_from(self.apart_from)} if self.apart_from else {}),
                "containers": [self._container()],
                "volumes": [{"name": _volume_name(path), **source} for path, source in self._volumes.items()],
            },
        }
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self.name},
            "spec": {
                "completions": self.pods,
                "parallelism": self.pods,
                "backoffLimit": self.retries,
                "template": template,
            },
        }

    @property
    def _volumes(self) -> Mapping[str, Mapping[str, Any]]:
        return {FOLDER: {"emptyDir": {}}, **(self.volumes or {})}

    def _container(self) -> dict[str, Any]:
        gpus = {"nvidia.com/gpu": self.gpus} if self.gpus else {}
        return {
            "name": self.name,
            "image": self.image,
            "command": [k8s_text(word) for word in self.command],
            "workingDir": FOLDER,
            **({"env": [each.source for each in self.variables]} if self.variables else {}),
            **({"ports": [{"containerPort": port} for port in self.ports]} if self.ports else {}),
            "resources": {"requests": {"cpu": self.cpus}, **({"limits": gpus} if gpus else {})},
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": [{"name": _volume_name(path), "mountPath": path} for path in self._volumes],
        }


def _volume_name(path: str) -> str:
    """The volume name of a folder.

    >>> _volume_name("/data/runs")
    'data-runs'
    """
    return path.strip("/").replace("/", "-")


def _apart_from(jobs: Sequence[str]) -> dict[str, Any]:
    """The affinity rule that keeps a pod off the nodes of these Jobs' pods."""
    chosen = {"matchExpressions": [{"key": "app", "operator": "In", "values": list(jobs)}]}
    term = {"labelSelector": chosen, "topologyKey": HOSTNAME_LABEL}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
