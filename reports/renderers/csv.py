"""Every table of a report as CSV: a line with its section and title, then the table, then an empty line."""

import csv
import io
from collections.abc import Iterator

from reports.document import Estimate, Report, Table
from reports.renderers.markdown import cell_text

# Including the full-width forms, which spreadsheets treat in the same way.
FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def render(report: Report) -> bytes:
    """The tables as UTF-8 CSV; an estimate takes three columns, and numbers keep their full precision."""
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
    """Keep untrusted text from becoming a formula in a spreadsheet."""
    return "'" + text if text.lstrip()[:1] in FORMULA_STARTS or text[:1] in ("\t", "\r", "\n") else text
