"""Step traces of the router, read back: one launch each."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reference_server.router.step_work import StepWork
from tuner.errors import TunerError

FORMAT = 1


class TraceError(TunerError):
    """A file that is missing or no step trace."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one launch: what each computed, `[steps, 6]` in the order of `StepWork`, and its time in ns."""

    work: npt.NDArray[np.float64]
    wall_ns: npt.NDArray[np.float64]
    total_ns: npt.NDArray[np.float64]
    facts: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.wall_ns)

    def chosen(self, keep: npt.NDArray[np.bool_]) -> "Steps":
        return Steps(self.work[keep], self.wall_ns[keep], self.total_ns[keep], self.facts)

    @classmethod
    def of(cls, works: Sequence[StepWork], wall_ns: Sequence[float], facts: Mapping[str, Any] | None = None) -> "Steps":
        """Steps made by hand or by a simulated machine."""
        walls = np.asarray(wall_ns, dtype=np.float64)
        return cls(np.asarray(works, dtype=np.float64).reshape(-1, len(StepWork._fields)), walls, walls, facts or {})


def read_steps(path: Path) -> Steps:
    """The steps of a trace whose wall time is known: those with work behind them. Raises TraceError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        head = json.loads(lines[0])
        columns = list(head["columns"])
        if head["format"] != FORMAT:
            raise TraceError(f"{path}: a step trace of format {head['format']}; this version reads {FORMAT}")
        places = [columns.index(name) for name in StepWork._fields]
        wall, total = columns.index("wall_ns"), columns.index("total_ns")
        # The last line may be cut off by a crash.
        rows = [row for row in map(_row, lines[1:]) if row is not None and row[wall] is not None]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: not a step trace ({error})") from None
    works = [[row[place] for place in places] for row in rows]
    return Steps(
        np.asarray(works, dtype=np.float64).reshape(-1, len(places)),
        np.asarray([row[wall] for row in rows], dtype=np.float64),
        np.asarray([row[total] for row in rows], dtype=np.float64),
        head.get("facts", {}),
    )


def read_facts(path: Path) -> Mapping[str, Any]:
    """What the server told of itself at the head of its trace, which may still be growing. Raises TraceError."""
    try:
        with path.open(encoding="utf-8") as file:
            facts = json.loads(file.readline())["facts"]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: not a step trace ({error})") from None
    if not isinstance(facts, Mapping):
        raise TraceError(f"{path}: not a step trace (no facts)")
    return facts


def _row(line: str) -> list[Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, list) else None


def joined(launches: Iterable[Steps]) -> Steps:
    """Several launches as one."""
    each = list(launches)
    return Steps(
        np.concatenate([steps.work for steps in each]),
        np.concatenate([steps.wall_ns for steps in each]),
        np.concatenate([steps.total_ns for steps in each]),
        each[0].facts,
    )


def without_first_of_shape(steps: Steps) -> Steps:
    """Leave out the first step of each new shape, which pays for what later ones find ready."""
    seen: set[tuple[bool, int, int]] = set()
    keep = np.ones(len(steps), dtype=np.bool_)
    for index, (prompts, tokens, _, _, rows, _) in enumerate(steps.work):
        shape = (prompts > 0, int(tokens).bit_length(), int(rows).bit_length())
        keep[index] = shape in seen
        seen.add(shape)
    return steps.chosen(keep)
