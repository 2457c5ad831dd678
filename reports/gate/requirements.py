"""Fixed limits on side B of a comparison, independent of side A."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """A fixed limit on side B, such as `ttft_p95_ms < 800`."""

    metric: str
    operator: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Requirement":
        """Parse `metric < bound` (also <=, >, >=). Raises ValueError."""
        match = re.fullmatch(r"\s*([a-z0-9_.]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*", text)
        if match is None:
            raise ValueError(f'`{text}` is not a requirement; write it as "ttft_p95_ms < 800"')
        return cls(match[1], match[2], float(match[3]))

    def is_met(self, value: float) -> bool:
        return OPERATORS[self.operator](value, self.bound)

    def __str__(self) -> str:
        return f"{self.metric} {self.operator} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class RequirementResult:
    """A requirement, and the median over the runs of side B; None without the metric."""

    requirement: Requirement
    value: float | None

    @property
    def is_met(self) -> bool:
        return self.value is not None and self.requirement.is_met(self.value)
