"""The container that an export describes: image, arguments, probes, and the resources that it needs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.servers.exported_text import CONTAINER_PORT

GIB = 2**30
# Memory of a server's processes in addition to the model, and cores for the router and for each GPU's shard.
PROCESS_GIB, ROUTER_CORES, CORES_PER_GPU = 4, 2, 2


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of a model's weights and, on a CPU, of its K/V."""

    weight_bytes: int
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExportedContainer:
    """`command`: the program, if it is not the image's. `memory`: None if the size of the model is unknown."""

    name: str
    image: str
    words: Sequence[str]
    environment: Mapping[str, str]
    comments: Sequence[str]
    port: int = CONTAINER_PORT
    ready: str = "/health"
    command: Sequence[str] = ()
    gpus: int = 1
    memory: ModelMemory | None = None

    @property
    def resources(self) -> Mapping[str, Any]:
        """Requests and limits of the container. On GPUs weights pass through memory while they are loaded."""
        requests: dict[str, Any] = {}
        limits: dict[str, Any] = {}
        if self.gpus:
            requests["cpu"] = ROUTER_CORES + CORES_PER_GPU * self.gpus
            limits["nvidia.com/gpu"] = self.gpus
        if self.memory is not None:
            model = math.ceil((self.memory.weight_bytes + self.memory.kv_bytes) / GIB)
            needed = PROCESS_GIB * max(1, self.gpus) + (0 if self.gpus else model)
            requests["memory"] = f"{needed}Gi"
            limits["memory"] = f"{needed + (model if self.gpus else 0)}Gi"
        return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}
