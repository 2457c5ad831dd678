"""What a trial came to, and its file in the study's folder.

Measured     launched, survived the load; `summary` is the run's
Infeasible   the configuration died or was refused: a result, told to the sampler as a violated constraint
Failed       the generator or the machine failed: says nothing about the configuration
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

RESULT_FILE = "result.json"

Phase = Literal["resolve", "launch", "warm", "measure"]
Cause = Literal["memory", "flag", "timeout", "crash", "rule"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement: the run directory and its summary."""

    run: Path
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A configuration that cannot serve this load. `log_tail` is the end of the server's log."""

    phase: Phase
    cause: Cause
    reason: str
    log_tail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A fault that was not the server's."""

    reason: str


TrialOutcome = Measured | Infeasible | Failed


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One line of a study: the settings, what they came to, and what the objective made of it.

    `value` is the objective's, None for a configuration that died; `violations` are by limit, above 0 a miss.
    `asked` is the sampler's number for it, None for the baseline and for confirming launches.
    """

    number: int
    settings: Mapping[str, Any]
    outcome: Literal["measured", "infeasible", "failed"]
    value: float | None = None
    measured: Mapping[str, float | None] = field(default_factory=dict)
    violations: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    phase: str = ""
    cause: str = ""
    run: str = ""
    asked: int | None = None
    seconds: float = 0.0

    @property
    def is_feasible(self) -> bool:
        return self.value is not None and all(violation <= 0 for violation in self.violations.values())

    def write(self, directory: Path) -> None:
        """Write `result.json` atomically."""
        part = directory / (RESULT_FILE + ".part")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n")
        part.replace(directory / RESULT_FILE)


def read_result(directory: Path) -> TrialResult | None:
    """The result in a trial's directory; None while it has none."""
    path = directory / RESULT_FILE
    if not path.exists():
        return None
    return TrialResult(**json.loads(path.read_text()))


# What a server that ran out of memory says before it goes.
_MEMORY_WORDS = (
    "out of memory",
    "outofmemory",
    "not enough memory",
    "cannot allocate memory",
    "can't allocate memory",
    "max-batch-prefill-tokens",
    "cuda-memory-fraction",
    "cpu-memory-gib",
)


def cause_of(log_tail: str, *, exit_code: int | None) -> Cause:
    """Why a server died, from the end of its log and its exit code.

    >>> cause_of("RuntimeError: Not enough memory to handle 4096 prefill tokens", exit_code=1)
    'memory'
    >>> cause_of("error: unknown flag --max-batchsize", exit_code=2)
    'flag'
    """
    text = log_tail.lower()
    if exit_code == 2:
        return "flag"
    if any(word in text for word in _MEMORY_WORDS):
        return "memory"
    return "crash"
