"""What the runs of a comparison say besides its verdict: what was run, and how its sides differ request by request."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from reports.across_runs import EFFECT_NOTE, LEAST_RUNS, SPREAD_NOTE, Side, effect_table, spread_table
from reports.document import Block, Facts, Section, Table, Text
from reports.facts import run_facts
from reports.results import load_run
from reports.summary import Analysis

FINISH_NOTE = (
    "Answers could end before the length asked for, so the sides' lengths may differ: the means at equal lengths allow "
    "for that."
)


def runs_sections(a: Sequence[Path], b: Sequence[Path], label_a: str, label_b: str) -> tuple[Section, ...]:
    """The sections of a comparison's report that need the runs themselves; none where a side's were not kept.

    From three runs a side on: spread within and between runs, the same prompts against each other, and, where lengths
    were not forced, means at equal lengths. They describe; the gate alone decides. Raises RunDirectoryError.
    """
    if not a or not b:
        return ()
    sides = _side(a, label_a), _side(b, label_b)
    told = (Section("What was run", (_facts(sides), _sizes(sides))),)
    if min(len(side.analyses) for side in sides) < LEAST_RUNS:
        return told
    effects, spread = effect_table(*sides), spread_table(sides)
    return (
        Section("Request by request", (Table("", effects, EFFECT_NOTE), *_finish_reasons(sides))),
        *told,
        Section("How far runs differ", (Table("", spread, SPREAD_NOTE),), is_closed=True),
    )


def _side(directories: Sequence[Path], label: str) -> Side:
    return Side(label, tuple(Analysis.of(load_run(directory)).named(label) for directory in directories))


def _finish_reasons(sides: tuple[Side, Side]) -> tuple[Block, ...]:
    """How often each reason ended an answer, by side; nothing where every length was forced."""
    if all(each.run.manifest.length_control == "forced" for side in sides for each in side.analyses):
        return ()
    counts = {side.label: _reasons(side) for side in sides}
    reasons = dict.fromkeys(reason for each in counts.values() for reason in each)
    frame = pd.DataFrame(
        {"finish reason": reason} | {label: each[reason] for label, each in counts.items()} for reason in reasons
    )
    return (Table("Finish reasons", frame, FINISH_NOTE),) if len(frame) else ()


def _reasons(side: Side) -> Counter[str]:
    total: Counter[str] = Counter()
    for analysis in side.analyses:
        total.update(analysis.summary["workload"]["finish_reasons"])
    return total


def _facts(sides: tuple[Side, Side]) -> Facts:
    """Both servers, then the load and the machine, which the sides share."""
    [server_a, load, machine], [server_b, *_] = (run_facts(side.analyses[0]).groups for side in sides)
    servers = zip("AB", sides, (server_a, server_b), strict=True)
    return Facts((*((_title(letter, side.label), server[1]) for letter, side, server in servers), load, machine))


def _title(letter: str, label: str) -> str:
    """A side's label with its letter, which some labels have already."""
    return f"Server {label}" if label == letter or label.startswith(f"{letter}: ") else f"{letter} · {label}"


def _sizes(sides: tuple[Side, Side]) -> Text:
    parts = []
    for letter, side in zip("AB", sides, strict=True):
        requests = sum(sum(analysis.summary["counts"].values()) for analysis in side.analyses)
        length = sum(analysis.measured.window.length_s for analysis in side.analyses)
        parts.append(f"{letter}: {len(side.analyses)} runs with {requests:,} requests measured over {length:,.0f} s")
    return Text(f"{'; '.join(parts)}. Load, machine and window are those of the first run of A.")
