"""How long model steps take: the law that drives a simulated server, and sums over steps of equal growth."""

import math
from typing import Protocol

from reference_server.router.step_work import StepWork


class StepLaw(Protocol):
    """How long a step takes."""

    def step_ns(self, work: StepWork) -> float:
        """Nanoseconds from the start of this call to the start of the next while there is work."""
        ...

    @property
    def kv_ns(self) -> float | None:
        """What one more K/V token costs a decode step; None where that is no constant."""
        ...


def stride_ns(first_ns: float, gain_ns: float, steps: int) -> float:
    """Sum of `steps` step times of which each is `gain_ns` longer than the one before.

    >>> stride_ns(5.0, 1.0, 3)
    18.0
    """
    return steps * first_ns + gain_ns * (steps * (steps - 1) // 2)


def steps_until(first_ns: float, gain_ns: float, due_ns: int, most: int) -> int:
    """Fewest steps, at least one, that together last until `due_ns`; never more than `most`.

    >>> steps_until(5.0, 0.0, 10, 100), steps_until(5.0, 0.0, 11, 100)
    (2, 3)
    """
    if first_ns <= 0:
        return most
    half = gain_ns / 2
    linear = first_ns - half
    guess = 2 * due_ns / (linear + math.sqrt(linear * linear + 4 * half * due_ns))
    count = min(max(1, math.ceil(guess)), most)
    while count > 1 and round(stride_ns(first_ns, gain_ns, count - 1)) >= due_ns:
        count -= 1
    while count < most and round(stride_ns(first_ns, gain_ns, count)) < due_ns:
        count += 1
    return count
