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
Cause = Literal["memory", "no_cache", "flag", "timeout", "crash", "quality", "early", "rule", "doomed"]

# Configurations that were refused before a launch: they cost none, so they do not count.
UNLAUNCHED = ("rule", "doomed")
# Who proposed a result that another study measured.
REUSED = "reused"


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement: the run directory and its summary; `steps` are the seconds of each step.

    `stopped` is the rule that ended the run before its time.
    """

    run: Path
    summary: Mapping[str, Any]
    steps: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A configuration that cannot serve this load. `log_tail` is the end of the server's log."""

    phase: Phase
    cause: Cause
    reason: str
    log_tail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A fault that was not the server's; `is_invalid` where the run was made and cannot be believed."""

    reason: str
    is_invalid: bool = False


TrialOutcome = Measured | Infeasible | Failed


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One line of a study: the settings, what they came to, and what the objective made of it.

    `value` is the objective's, None for a configuration that died, and the mean of `count` runs where it was asked for
    again; `second` is the other objective's in a Pareto search. `violations` are by limit, above 0 a miss.
    `origin` says who proposed it: baseline, opening, sampler, guide, confirm, noise, anchor. `steps` are the seconds
    that launching, measuring and stopping took.
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
    seconds: float = 0.0
    second: float | None = None
    count: int = 1
    origin: str = "sampler"
    started: float = 0.0
    log_tail: str = ""
    steps: Mapping[str, float] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_feasible(self) -> bool:
        return self.value is not None and all(violation <= 0 for violation in self.violations.values())

    @property
    def was_launched(self) -> bool:
        """Whether it cost a launch and says something: what `trials` counts."""
        return self.outcome != "failed" and self.cause not in UNLAUNCHED and self.origin != REUSED

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


# What a server says that cannot place even one request's cache, before it goes.
_NO_CACHE_WORDS = (
    "not enough memory to handle",
    "not enough memory for",
    "no k/v block fits",
    "cache below one",
    # A budget or a request that the cache cannot hold.
    "must be <= `max_batch_total_tokens`",
)
# What a server that ran out of memory says.
_MEMORY_WORDS = (
    "out of memory",
    "outofmemory",
    "not enough memory",
    "cannot allocate memory",
    "can't allocate memory",
    "bad_alloc",
    "memoryerror",
)


def cause_of(log_tail: str, *, exit_code: int | None) -> Cause:
    """Why a server died, from the end of its log and its exit code.

    >>> cause_of("RuntimeError: Not enough memory to handle 4096 prefill tokens", exit_code=1)
    'no_cache'
    >>> cause_of("torch.OutOfMemoryError: CUDA out of memory", exit_code=1)
    'memory'
    >>> cause_of("error: unknown flag --max-batchsize", exit_code=2)
    'flag'
    """
    text = log_tail.lower()
    if any(word in text for word in _NO_CACHE_WORDS):
        return "no_cache"
    if any(word in text for word in _MEMORY_WORDS):
        return "memory"
    return "flag" if exit_code == 2 else "crash"


def is_memory_death(log_tail: str) -> bool:
    """Whether the end of a log tells of memory that ran out."""
    return cause_of(log_tail, exit_code=None) == "memory"
