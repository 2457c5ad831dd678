"""How many users a closed loop has over time: pure functions of the seconds since its start."""

from dataclasses import dataclass
from typing import Protocol


class Shape(Protocol):
    """Users over time."""

    def users(self, t_s: float) -> int:
        """Users that are to be there `t_s` seconds after the start."""


@dataclass(frozen=True, slots=True)
class ConstantShape:
    """All users from the first moment on."""

    count: int

    def users(self, t_s: float) -> int:  # noqa: ARG002 - the protocol's
        return self.count
