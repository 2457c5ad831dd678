"""A stored comparison: its report, rendered again, and its verdict as text."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadgen.commands.present import COLUMNS, render_table
from loadgen.errors import UsageError
from reports.gate.comparison import Comparison
from reports.gate.noise_split import components_table
from reports.gate.saved_comparison import COMPARISON_FILE, SavedComparison, load_comparison
from reports.metrics.summary import Analysis
from reports.pages.comparison_page import (
    INTERLEAVED,
    build_comparison_report,
    metrics_table,
    verdict_line,
)
from reports.pages.comparison_runs import analysis_of, runs_sections
from reports.renderers.write import write_report
from reports.run_store import RunDirectoryError
from reports.text import plain_text


def rebuild(
    directory: Path, out: Path, runs: tuple[Sequence[Path], Sequence[Path]] | None = None
) -> tuple[SavedComparison, Path]:
    """Render the report of a stored comparison into `out`. Returns its path too. Raises UsageError if it is damaged.

    runs: those of both sides; by default those that the file names, if they are in its directory.
    """
    try:
        saved = load_comparison(directory)
        comparison = saved.comparison
        runs_a, runs_b = runs or (saved.runs_a, saved.runs_b)
        if runs is None and saved.outside:
            note = f"{len(saved.outside)} runs outside {directory} are not read, such as {saved.outside[0]}"
            comparison = replace(comparison, notes=(*comparison.notes, plain_text(f"{note}; copy them into it")))
        labels = comparison.label_a, comparison.label_b
        is_sliced = comparison.slices > 1
        # Slices are many, always live, and summarized by the comparison that gives its runs.
        analyse = Analysis.summarized if is_sliced and runs is not None else analysis_of
        sections = (
            () if comparison.refusals else runs_sections(runs_a, runs_b, *labels, is_sliced=is_sliced, analyse=analyse)
        )
    except RunDirectoryError as error:
        raise UsageError(str(error)) from error
    return saved, write_report(build_comparison_report(comparison, saved.reproduce, sections), out).html


def report_again(directory: Path, out: Path, *, is_json: bool) -> str:
    """Render the report of a stored comparison again; returns the text for stdout. Raises UsageError."""
    saved, _ = rebuild(directory, out)
    if is_json:
        return (directory / COMPARISON_FILE).read_text(encoding="utf-8").rstrip()
    return render(saved.comparison)


def render(comparison: Comparison) -> str:
    """The verdict and the table of metrics, as text."""
    line = verdict_line(comparison)
    parts = [textwrap.fill(f"{line.word}: {line.sentence}", COLUMNS)]
    parts += [textwrap.fill(reason, COLUMNS, initial_indent="  ", subsequent_indent="    ") for reason in line.reasons]
    if comparison.options.equal_contention:
        parts += [f"  {note}" for note in comparison.notes if "contention" in note]
    if comparison.slices > 1:
        parts.append(f"  {comparison.size}: {INTERLEAVED}.")
    if comparison.metrics:
        parts += ["", render_table(metrics_table(comparison))]
    if comparison.noise:
        parts += ["", "noise, standard deviations in %:", render_table(components_table(comparison.noise))]
    return "\n".join(parts)
