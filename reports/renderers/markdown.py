"""A report as GitHub-flavoured Markdown; figures are links into `figures/`."""

import re
from typing import Any

import pandas as pd

from reports.document import (
    MISSING,
    Block,
    Estimate,
    Facts,
    Link,
    Plot,
    Report,
    Table,
    Text,
    Tile,
    Tiles,
    VerdictLine,
    format_number,
)

MARKS = {
    "valid": "✅",
    "warning": "⚠️",
    "degraded": "⚠️",
    "invalid": "❌",
    "pass": "✅",
    "inconclusive": "❔",
    "regression": "❌",
}
MARKS |= {"improvement": "🚀", "invalid_runs": "❌"}


def render(report: Report) -> bytes:
    """The report as UTF-8 Markdown."""
    parts = [f"# {_escape(report.title)}", _escape(report.subtitle), *(_verdict(each) for each in report.verdicts)]
    for section in report.sections:
        parts.append(f"## {_escape(section.title)}")
        parts += [text for block in section.blocks if (text := _block(block))]
    return ("\n\n".join(part for part in parts if part) + "\n").encode()


def _verdict(verdict: VerdictLine) -> str:
    label = f"{_escape(verdict.label)}: " if verdict.label else ""
    line = f"{MARKS.get(verdict.level, '')} **{label}{_escape(verdict.word)}.** {_escape(verdict.sentence)}"
    return "\n".join([line, *(f"- {_escape(reason)}" for reason in verdict.reasons)])


def _block(block: Block) -> str:
    match block:
        case Facts():
            return "\n\n".join(f"**{_escape(title)}**\n\n{_facts(facts)}" for title, facts in block.groups if facts)
        case Tiles():
            return "\n".join(f"- {_tile(tile)}" for tile in block.tiles)
        case Table():
            return table(block)
        case Plot():
            caption = f"*{_escape(block.title)}. {_escape(block.caption)}*"
            return f"![{_escape(block.alt)}](figures/{block.name}.png)\n\n{caption}"
        case Text():
            return f"```\n{block.text.replace('```', '')}\n```" if block.is_code else _escape(block.text)


def _tile(tile: Tile) -> str:
    details = f" ({'; '.join(tile.details)})" if tile.details else ""
    return f"{_escape(tile.title)}: **{_escape(tile.value)}** {_escape((tile.unit + details).strip())}".strip()


def _facts(facts: tuple[tuple[str, str], ...]) -> str:
    return "\n".join(f"- {_escape(name)}: {_escape(value)}" for name, value in facts)


def table(block: Table) -> str:
    """One table with its title and its note."""
    frame = block.frame
    if not len(frame):
        return ""
    numeric = [is_numeric(frame[name]) for name in frame.columns]
    lines = [
        "| " + " | ".join(_cell(name) for name in frame.columns) + " |",
        "|" + "|".join("---:" if right else ":---" for right in numeric) + "|",
    ]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in frame.itertuples(index=False)]
    title = f"**{_escape(block.title)}**\n\n" if block.title else ""
    note = f"\n\n*{_escape(block.note)}*" if block.note else ""
    return title + "\n".join(lines) + note


def is_numeric(column: "pd.Series[Any]") -> bool:
    """Whether a column contains only numbers, and is therefore aligned right."""
    return all(isinstance(value, int | float | Estimate) or value in (None, "∞") for value in column)


def cell_text(value: Any) -> str:
    """A cell as plain text."""
    if value is None or (isinstance(value, float) and value != value):
        return MISSING
    return format_number(value) if isinstance(value, int | float) else str(value)


def _cell(value: Any) -> str:
    text = _escape(cell_text(value)).replace("|", "\\|")
    return f"[{text}]({value.href})" if isinstance(value, Link) else text


def _escape(text: str) -> str:
    """Escape markup in untrusted text: HTML, links, emphasis, line breaks."""
    flat = " ".join(str(text).split())
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", flat)
