"""The protocol of step times, and sums of linearly growing step times."""

import math
from typing import Protocol, runtime_checkable

from reference_server.router.scheduling.step_work import StepWork
from tuner.simulator.step_ranges import StepRanges


class StepLaw(Protocol):
    """The time of a model step."""

    def step_ns(self, work: StepWork) -> float:
        """Time from the start of this call to the start of the next call."""
        ...

    @property
    def kv_ns(self) -> float | None:
        """Time that one more K/V token adds to a decode step; None if it is not constant."""
        ...


@runtime_checkable
class AdaptedLaw(StepLaw, Protocol):
    """A law of a server with LoRA adapters."""

    @property
    def has_adapters(self) -> bool:
        """Whether the time of adapters was measured."""
        ...

    def adapters_ns(self, adapters: int, tokens: int) -> float:
        """Time that adapters add to a step with `tokens` tokens that use one."""
        ...


@runtime_checkable
class RangedLaw(StepLaw, Protocol):
    """A law that was fitted to measured steps."""

    @property
    def ranges(self) -> StepRanges | None:
        """The sizes of the measured steps; None if they are unknown."""
        ...


def stride_ns(first_ns: float, gain_ns: float, steps: int) -> float:
    """Total time of `steps` steps, each `gain_ns` longer than the one before.

    >>> stride_ns(5.0, 1.0, 3)
    18.0
    """
    return steps * first_ns + gain_ns * (steps * (steps - 1) // 2)


def steps_until(first_ns: float, gain_ns: float, due_ns: int, most: int) -> int:
    """Smallest number of steps, from 1 to `most`, whose total time is at least `due_ns`.

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
