"""The tables of a report as CSV: for each, a line with section and title, the table, and an empty line."""

import csv
import io
from collections.abc import Iterator

from reports.document import Estimate, Report, Table
from reports.renderers.markdown import cell_text

FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""First characters of a formula; spreadsheets treat the full-width forms in the same way."""


def render(report: Report) -> bytes:
    """The tables as UTF-8 CSV. An estimate has three columns, and numbers have their full precision."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    for section in report.sections:
        for block in section.blocks:
            if isinstance(block, Table) and len(block.frame):
                writer.writerow([escape_formula(section.title), escape_formula(block.title)])
                writer.writerows(_rows(block))
                writer.writerow([])
    return target.getvalue().encode()


def _rows(block: Table) -> Iterator[list[object]]:
    frame = block.frame
    estimates = {name for name in frame.columns if any(isinstance(value, Estimate) for value in frame[name])}
    header: list[object] = []
    for name in frame.columns:
        header += [
            escape_formula(text) for text in ((name, f"{name} lo", f"{name} hi") if name in estimates else (name,))
        ]
    yield header
    for row in frame.itertuples(index=False):
        cells: list[object] = []
        for name, value in zip(frame.columns, row, strict=True):
            if isinstance(value, Estimate):
                cells += [value.value, value.lo, value.hi]
            elif isinstance(value, int | float):
                cells.append("" if value != value else value)
            else:
                cells += [escape_formula(cell_text(value))] + ["", ""] * (name in estimates)
        yield cells


def escape_formula(text: str) -> str:
    """The text, with an apostrophe in front if a spreadsheet would take it for a formula."""
    return "'" + text if text.lstrip()[:1] in FORMULA_STARTS or text[:1] in ("\t", "\r", "\n") else text
