"""What the processes that make a load are told: `WorkerPlan` the load, `JoinPlan` where to be told it."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

from loadgen.protocols.dialect import Sampling


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One load. `config` is a BenchConfig as JSON, without its secrets; `headers` go with every request.

    `workload_hash` and `schedule_hash` are what a worker has to arrive at when it makes the load from its config.
    """

    run_id: str
    directory: str
    parent_pid: int
    url: str
    api: str
    config: dict[str, Any]
    sampling: Sampling
    limits: dict[str, int | None]
    vocabulary: dict[str, Any] | None = None
    answer_tokens: list[int | None] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    workload_hash: str | None = None
    schedule_hash: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{**value, "sampling": Sampling(**value["sampling"])})


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """Where a worker finds its master, and the key it shows there.

    `directory` is where its records go, None for a worker that sends them; `seat` the place of one that its own
    master started.
    """

    host: str
    port: int
    parent_pid: int
    key: str = ""
    directory: str | None = None
    seat: int | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
