"""Reads the router's step traces. Each launch has one trace."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reference_server.router.scheduling.step_work import StepWork
from tuner.errors import TraceError

FORMAT = 2
DRAFTS = ("drafts_proposed", "drafts_accepted")
ADAPTERS = ("adapters", "adapted_tokens")


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """The steps of one launch.

    work: [steps, 7], in the order of `StepWork`. wall_ns, total_ns: [steps]. calls: [steps, 2], number of calls with
    prompts and of decode-only calls, if rows are sums over steps. drafts: [steps, 2, positions], the drafted tokens at
    each position and those that were accepted; None without drafts. adapted: [steps, 2], the LoRA adapters of the step
    and the tokens that it computes with one; None without adapters.
    """

    work: npt.NDArray[np.float64]
    wall_ns: npt.NDArray[np.float64]
    total_ns: npt.NDArray[np.float64]
    facts: Mapping[str, Any]
    calls: npt.NDArray[np.float64] | None = None
    drafts: npt.NDArray[np.float64] | None = None
    adapted: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.wall_ns)

    def chosen(self, keep: npt.NDArray[np.bool_]) -> "TracedSteps":
        calls = None if self.calls is None else self.calls[keep]
        drafts = None if self.drafts is None else self.drafts[keep]
        adapted = None if self.adapted is None else self.adapted[keep]
        return TracedSteps(self.work[keep], self.wall_ns[keep], self.total_ns[keep], self.facts, calls, drafts, adapted)

    @property
    def drafted(self) -> npt.NDArray[np.float64]:
        """[steps]: drafted tokens that the step verified."""
        return np.zeros(len(self)) if self.drafts is None else self.drafts[:, 0].sum(axis=1)

    @property
    def adapted_of_rows(self) -> npt.NDArray[np.float64]:
        """[steps, 2]: `adapted`, zeros without adapters."""
        return np.zeros((len(self), 2)) if self.adapted is None else self.adapted

    @property
    def is_from_metrics(self) -> bool:
        """Whether rows are sums over intervals instead of single steps."""
        return self.calls is not None

    @property
    def calls_of_rows(self) -> npt.NDArray[np.float64]:
        """[steps, 2]: calls with prompts, and decode-only calls."""
        if self.calls is not None:
            return self.calls
        has_prompts = self.work[:, 0] > 0
        return np.stack([has_prompts, ~has_prompts & (self.work[:, 4] > 0)], axis=1).astype(np.float64)

    @classmethod
    def of(
        cls,
        works: Sequence[npt.ArrayLike],
        wall_ns: Sequence[float],
        facts: Mapping[str, Any] | None = None,
        *,
        calls: Sequence[npt.ArrayLike] | None = None,
    ) -> "TracedSteps":
        """Steps from rows of work and their times."""
        work = np.asarray(works, dtype=np.float64).reshape(-1, len(StepWork._fields))
        walls = np.asarray(wall_ns, dtype=np.float64)
        return cls(
            work,
            walls,
            walls,
            facts or {},
            None if calls is None else np.asarray(calls, dtype=np.float64).reshape(-1, 2),
        )


def read_steps(path: Path) -> TracedSteps:
    """The steps of a trace. Raises TraceError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        head = json.loads(lines[0])
        columns = list(head["columns"])
        if head["format"] != FORMAT:
            raise TraceError(
                f"{path} has step trace format {head['format']}, but must have format {FORMAT}: measure again"
            )
        places = [columns.index(name) for name in StepWork._fields]
        wall, total = columns.index("wall_ns"), columns.index("total_ns")
        # The last line may be incomplete after a crash.
        rows = [row for row in map(_row, lines[1:]) if row is not None]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: not a step trace ({error})") from None
    works = [[row[place] for place in places] for row in rows]
    return TracedSteps(
        np.asarray(works, dtype=np.float64).reshape(-1, len(places)),
        np.asarray([row[wall] for row in rows], dtype=np.float64),
        np.asarray([row[total] for row in rows], dtype=np.float64),
        head.get("facts", {}),
        drafts=_drafts(rows, columns),
        adapted=_adapted(rows, columns),
    )


def _adapted(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> npt.NDArray[np.float64] | None:
    """[steps, 2]: adapters, and tokens with one; None if no step has any."""
    if not set(ADAPTERS) <= set(columns):
        return None
    places = [columns.index(name) for name in ADAPTERS]
    found = np.asarray([[row[place] for place in places] for row in rows], dtype=np.float64).reshape(-1, 2)
    return found if found.any() else None


def _drafts(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> npt.NDArray[np.float64] | None:
    """[steps, 2, positions]: drafted and accepted tokens by position; None if no step has any."""
    if not set(DRAFTS) <= set(columns):
        return None
    lists = [[list(row[columns.index(name)] or ()) for name in DRAFTS] for row in rows]
    positions = max((len(proposed) for proposed, _ in lists), default=0)
    if not positions:
        return None
    padded = [[[*each, *[0] * (positions - len(each))] for each in both] for both in lists]
    return np.asarray(padded, dtype=np.float64)


def read_facts(path: Path) -> Mapping[str, Any]:
    """The server facts in the head of a trace. The trace can be incomplete. Raises TraceError."""
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


def joined(launches: Iterable[TracedSteps]) -> TracedSteps:
    """The steps of several launches, concatenated."""
    each = list(launches)
    is_sums = any(steps.is_from_metrics for steps in each)
    return TracedSteps(
        np.concatenate([steps.work for steps in each]),
        np.concatenate([steps.wall_ns for steps in each]),
        np.concatenate([steps.total_ns for steps in each]),
        each[0].facts,
        np.concatenate([steps.calls_of_rows for steps in each]) if is_sums else None,
        _joined_drafts(each),
        None
        if all(steps.adapted is None for steps in each)
        else np.concatenate([steps.adapted_of_rows for steps in each]),
    )


def _joined_drafts(launches: Sequence[TracedSteps]) -> npt.NDArray[np.float64] | None:
    positions = max((steps.drafts.shape[2] for steps in launches if steps.drafts is not None), default=0)
    if not positions:
        return None
    padded = [np.zeros((len(steps), 2, positions)) for steps in launches]
    for drafts, steps in zip(padded, launches, strict=True):
        if steps.drafts is not None:
            drafts[:, :, : steps.drafts.shape[2]] = steps.drafts
    return np.concatenate(padded)


def without_first_of_shape(steps: TracedSteps) -> TracedSteps:
    """The steps without the first one of each shape, which includes one-time costs such as compilation."""
    seen: set[tuple[bool, int, int]] = set()
    keep = np.ones(len(steps), dtype=np.bool_)
    for index, (prompts, tokens, _, _, rows, _, _) in enumerate(steps.work):
        shape = (prompts > 0, int(tokens).bit_length(), int(rows).bit_length())
        keep[index] = shape in seen
        seen.add(shape)
    return steps.chosen(keep)
