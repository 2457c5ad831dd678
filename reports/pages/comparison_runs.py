"""The sections of a comparison's report that need the saved runs: variation, lengths, differences of the setups."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from reports.document import Block, Facts, Section, Table, Text
from reports.metrics.summary import Analysis
from reports.pages.run_pages import runs_section
from reports.pages.sections.across_runs import EFFECT_NOTE, MIN_RUNS, SPREAD_NOTE, Side, effect_table, spread_table
from reports.pages.sections.facts import run_facts
from reports.saved_run import load_run

DIFFERENCE = "Difference of the sides"
VARYING = ("address", "started", "window", "arrival times", "seed", "notes", "cached, % of prompt tokens")
"""Facts that differ even between two runs of the same server, so they are not differences of the sides."""
FINISH_NOTE = (
    "Responses could end before the requested length, so the lengths of the sides may differ. The means at equal "
    "lengths correct for this."
)


def analysis_of(directory: Path) -> Analysis:
    return Analysis.of(load_run(directory))


def runs_sections(
    a: Sequence[Path],
    b: Sequence[Path],
    label_a: str,
    label_b: str,
    *,
    is_sliced: bool = False,
    analyse: Callable[[Path], Analysis] = analysis_of,
) -> tuple[Section, ...]:
    """The sections of a comparison's report that need the saved runs; empty if the runs of a side were not kept.

    With three runs per side: variation within and between runs, changes for the same prompts, and, if lengths were not
    forced, means at equal lengths. These sections are descriptive; decisions are made by the gate. For slices
    (`is_sliced`) there is only the setup: slices of the same launch do not vary independently. analyse: reads a run.
    Raises RunDirectoryError.
    """
    if not a or not b:
        return ()
    sides = _side(a, label_a, analyse), _side(b, label_b, analyse)
    setup = (*_difference(sides), Section("Setup", (_facts(sides), _sizes(sides, "slices" if is_sliced else "runs"))))
    listed = runs_section(
        (f"{letter} {number}", analysis)
        for letter, side in zip("AB", sides, strict=True)
        for number, analysis in enumerate(side.analyses, 1)
    )
    if is_sliced or min(len(side.analyses) for side in sides) < MIN_RUNS:
        return (*setup, listed)
    effects, spread = effect_table(*sides), spread_table(sides)
    return (
        Section("Per-request comparison", (Table("", effects, EFFECT_NOTE), *_finish_reasons(sides))),
        *setup,
        Section("Run-to-run variation", (Table("", spread, SPREAD_NOTE),), is_closed=True),
        listed,
    )


def _side(directories: Sequence[Path], label: str, analyse: Callable[[Path], Analysis]) -> Side:
    return Side(label, tuple(analyse(directory).named(label) for directory in directories))


def _difference(sides: tuple[Side, Side]) -> tuple[Section, ...]:
    """The facts of the servers and loads that differ between the sides; empty without a difference."""
    a, b = (
        {
            (group.partition(" · ")[0], name): value
            for group, facts in run_facts(side.analyses[0]).groups
            for name, value in facts
        }
        for side in sides
    )
    names = [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name) and name[1] not in VARYING]
    if not names:
        return ()
    frame = pd.DataFrame({"": name, "A": a.get((group, name)), "B": b.get((group, name))} for group, name in names)
    return (Section(DIFFERENCE, (Table("", frame),)),)


def _facts(sides: tuple[Side, Side]) -> Facts:
    """The facts of both servers, and of the load and the machine of both sides."""
    [server_a, load, machine], [server_b, *_] = (run_facts(side.analyses[0]).groups for side in sides)
    servers = zip("AB", sides, (server_a, server_b), strict=True)
    return Facts((*((_title(letter, side.label), server[1]) for letter, side, server in servers), load, machine))


def _title(letter: str, label: str) -> str:
    """The label of a side with its letter, unless the label starts with the letter."""
    return f"Server {label}" if label == letter or label.startswith(f"{letter}: ") else f"{letter} · {label}"


def _sizes(sides: tuple[Side, Side], kind: str) -> Text:
    parts = []
    for letter, side in zip("AB", sides, strict=True):
        requests = sum(sum(analysis.summary["counts"].values()) for analysis in side.analyses)
        length = sum(analysis.measured.window.length_s for analysis in side.analyses)
        parts.append(f"{letter}: {len(side.analyses)} {kind} with {requests:,} requests measured over {length:,.0f} s")
    return Text(f"{'; '.join(parts)}. Load, machine and window: first run of A.")


def _finish_reasons(sides: tuple[Side, Side]) -> tuple[Block, ...]:
    """The number of responses by finish reason and side; empty if every length was forced."""
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
