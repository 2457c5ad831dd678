"""Facts about prompts and answers that show a misreporting server or proxy: counts, ends, lengths, bursts.

`client_checks.py` has the bounds. A fact is None where it was not measured.
"""

from typing import Any

import numpy as np
import pandas as pd

from reports.metrics.measured import Measured
from reports.metrics.requests.bursts import burst_size
from reports.run_schema import Status, TokensSource

TEMPLATE_TOKENS = {"openai-chat": 64, "anthropic": 64, "ollama-chat": 64}
"""Tokens that a chat template may add to a prompt, by API."""
ERRORS = (
    *(Status.CONNECT_ERROR, Status.OVERLOADED, Status.HTTP_4XX, Status.HTTP_5XX, Status.STREAM_ERROR),
    *(Status.BAD_PAYLOAD, Status.PROTOCOL_ERROR),
)
"""Failures that do not depend on the length of the run."""
SPECIAL_TOKENS = 4
"""Tokens that may be added to a prompt without a chat template."""


def answer_facts(measured: Measured) -> dict[str, Any]:
    """Facts about the requests that started in the window."""
    population = measured.population
    succeeded = population[population["status"] == Status.OK]
    burst = burst_size(measured.started_events)
    return {
        "usage_mismatch_median": _median(_usage_mismatch(succeeded)),
        "unfinished_answers": _unfinished(succeeded),
        "answers": len(succeeded),
        "only_errors": len(population) > 0 and bool(population["status"].isin(ERRORS).all()),
        "burst_events": None if burst is None else burst.events,
        "burst_interval_s": None if burst is None else burst.interval_s,
        "planned_input_tokens": _median(succeeded["planned_input_tokens"]),
        "input_tokens_excess": _input_excess(measured, succeeded),
        "other_length_share": _other_length_share(measured, succeeded),
    }


def _usage_mismatch(answers: pd.DataFrame) -> "pd.Series[float]":
    """Relative distance of each usage count from its possible range: one token per event up to the requested limit."""
    counted = answers[answers["tokens_source"] == TokensSource.SERVER_USAGE]
    usage, events = counted["output_tokens"], counted["events"]
    limit = counted["requested_output_tokens"].fillna(np.inf)
    outside = (events - usage).clip(lower=0) + (usage - limit).clip(lower=0)
    return outside / usage.where(usage > 0, events.clip(lower=1))


def _unfinished(answers: pd.DataFrame) -> int:
    """Number of streams without a finish reason; 0 if the server never sends a finish reason."""
    streamed = answers[answers["events"] > 0]
    missing = int(streamed["finish_reason"].isna().sum())
    return missing if missing < len(streamed) else 0


def _input_excess(measured: Measured, answers: pd.DataFrame) -> float | None:
    """Median of counted minus planned prompt tokens, without those that a chat template may add.

    Negative if the server counted too few; None if unknown.
    """
    if (answers["images"] > 0).any():
        # Only the server can count the tokens of an image.
        return None
    difference = _median(answers["input_tokens"] - answers["planned_input_tokens"])
    if difference is None:
        return None
    allowed = TEMPLATE_TOKENS.get(str(measured.manifest.target.get("api")), SPECIAL_TOKENS)
    return float(np.sign(difference) * max(0.0, abs(difference) - (allowed if difference > 0 else 0)))


def _other_length_share(measured: Measured, answers: pd.DataFrame) -> float | None:
    """The share of answers that do not have exactly the forced length, of those whose tokens the server counted."""
    if measured.manifest.length_control != "forced":
        return None
    is_counted = answers["tokens_source"].isin((TokensSource.SERVER_STREAM, TokensSource.SERVER_USAGE))
    # A structured answer ends at the end of its structure, so its length is not forced.
    is_forced = answers["requested_output_tokens"].notna() & answers["constraint"].isna()
    counted = answers[is_counted & is_forced]
    if not len(counted):
        return None
    return float((counted["output_tokens"] != counted["requested_output_tokens"]).mean())


def _median(values: "pd.Series[float]") -> float | None:
    known = values.dropna()
    return float(known.median()) if len(known) else None
