"""A report as JSON: its sections and tables for programs."""

import json
from dataclasses import asdict
from typing import Any

from reports.document import Block, Estimate, Facts, Link, Plot, Report, Table, Text, Tiles


def render(report: Report) -> bytes:
    """The report as UTF-8 JSON; numbers are finite or null."""
    document = {
        "title": report.title,
        "subtitle": report.subtitle,
        "verdicts": [asdict(verdict) for verdict in report.verdicts],
        "sections": [
            {"title": section.title, "blocks": [_block(block) for block in section.blocks]}
            for section in report.sections
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _block(block: Block) -> dict[str, Any]:
    match block:
        case Facts():
            return {"facts": {title: dict(facts) for title, facts in block.groups}}
        case Tiles():
            return {"tiles": [asdict(tile) for tile in block.tiles]}
        case Table():
            rows = [[_value(value) for value in row] for row in block.frame.itertuples(index=False)]
            return {"table": block.title, "columns": list(block.frame.columns), "rows": rows, "note": block.note}
        case Plot():
            return {"figure": block.name, "title": block.title, "alt": block.alt}
        case Text():
            return {"text": block.text}


def _value(value: Any) -> Any:
    if isinstance(value, Estimate):
        return asdict(value)
    if isinstance(value, Link):
        return value.text
    return None if isinstance(value, float) and value != value else value
