"""Speculation as the server counts it: tokens per step, and accepted drafts by their position in a draft."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reports.metrics.server.server_series import counter_changes
from reports.metrics.windows import Window

POSITION = "position"


@dataclass(frozen=True, slots=True)
class DraftSeries:
    """The counters of one server, each with the label `position`.

    proposed: drafted tokens; a counter without the label is the number of drafts, which all have every position.
    first: the label of the first position. steps: generations of a step, and the tokens that each had beyond the first.
    """

    proposed: str
    accepted: str
    first: int
    steps: tuple[str, str] | None = None


SERIES = (
    DraftSeries(
        "tgi_draft_tokens_per_position",
        "tgi_accepted_tokens_per_position",
        1,
        ("tgi_request_skipped_tokens_count", "tgi_request_skipped_tokens_sum"),
    ),
    DraftSeries("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total", 0),
)


def speculation_summary(rows: Iterable[Mapping[str, Any]], window: Window) -> dict[str, Any] | None:
    """Drafts of the window: {proposed, accepted, steps, tokens_per_step, positions}; None if the server has none.

    steps: the rows of steps that had output. For a server that does not count them, this is the number of its drafts;
    `tokens_per_step` then covers only steps with a draft.
    """
    known = list(rows)
    for series in SERIES:
        found = _summary(series, known, window)
        if found is not None:
            return found
    return None


def _summary(series: DraftSeries, rows: list[Mapping[str, Any]], window: Window) -> dict[str, Any] | None:
    proposed = counter_changes(rows, series.proposed, POSITION, window)
    accepted = counter_changes(rows, series.accepted, POSITION, window)
    drafts = proposed.pop("", None)
    if drafts is not None:
        proposed = dict.fromkeys(accepted, drafts)
    if not sum(proposed.values()):
        return None
    positions = [
        {"position": int(label) + 1 - series.first, "proposed": count, "accepted": accepted.get(label, 0.0)}
        for label, count in sorted(proposed.items(), key=lambda each: int(each[0]))
    ]
    total = sum(accepted.values())
    steps: float | None = drafts
    beyond: float | None = total
    if series.steps is not None:
        steps, beyond = (counter_changes(rows, name, "", window).get("") for name in series.steps)
    return {
        "proposed": sum(proposed.values()),
        "accepted": total,
        "steps": steps,
        "tokens_per_step": 1 + (beyond or 0.0) / steps if steps else None,
        "positions": positions,
    }
