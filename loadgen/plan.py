"""`WorkerPlan`: everything the load-making process is told, as one JSON object on its stdin."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

from loadgen.protocols.dialect import Sampling


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """`config` is a BenchConfig as JSON, without its secrets; `headers` go with every request."""

    run_id: str
    directory: str
    parent_pid: int
    url: str
    api: str
    config: dict[str, Any]
    sampling: Sampling
    limits: dict[str, int | None]
    vocabulary: dict[str, Any] | None = None
    answer_tokens: list[int] | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{**value, "sampling": Sampling(**value["sampling"])})
