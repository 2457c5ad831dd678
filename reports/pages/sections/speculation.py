"""The section on speculation: tokens per step, and the accepted drafts by position."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from reports.document import Block, Section, Table, Text, format_number, format_percent
from reports.metrics.summary import Analysis

NOTE = (
    "Counted by the server over the window. A draft's token can only be accepted if those before it are: `accepted` is "
    "a share of the drafted tokens at this position, `after an accepted one` a share of those whose previous token was "
    "accepted."
)
MIN_BURST_EVENTS = 1.1
"""Fewer events per burst than these are streams without bursts."""


def speculation_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    """A table for each run whose server verified drafts."""
    blocks: list[Block] = []
    for analysis in analyses:
        found = analysis.summary.get("speculation")
        if found:
            blocks.append(Text(speculation_sentence(analysis)))
            blocks.append(Table(analysis.label if len(analyses) > 1 else "", positions_table(found["positions"]), NOTE))
    return (Section("Speculation", tuple(blocks)),) if blocks else ()


def speculation_sentence(analysis: Analysis) -> str:
    """The tokens of a step, the accepted share, and what arrives at the client."""
    found = analysis.summary["speculation"]
    parts = []
    if found["tokens_per_step"] is not None:
        parts.append(f"A step gives a request {format_number(found['tokens_per_step'])} tokens on average.")
    share = format_percent(found["accepted"] / found["proposed"])
    parts.append(f"{share} of {found['proposed']:,.0f} drafted tokens were accepted.")
    burst = analysis.summary["client"].get("burst_events")
    if burst is not None and burst >= MIN_BURST_EVENTS:
        parts.append(
            f"At the client, {format_number(burst)} events arrive together on average: a gap inside such a burst is "
            "about 0, and ITL divides the time before a burst evenly among its tokens. Compare ITL or TPOT, not gaps."
        )
    return " ".join(parts)


def positions_table(positions: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row per position in a draft."""
    rows, before = [], None
    for each in positions:
        proposed, accepted = each["proposed"], each["accepted"]
        rows.append(
            {
                "position": each["position"],
                "drafted tokens": round(proposed),
                "accepted tokens": round(accepted),
                "accepted, % ↑": 100 * accepted / proposed if proposed else None,
                "after an accepted one, % ↑": 100 * accepted / before if before else None,
            }
        )
        before = accepted
    return pd.DataFrame(rows)
