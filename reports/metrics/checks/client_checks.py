"""Checks of the facts about the load generator and its answers, each against two fixed bounds."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from reports.metrics.checks.findings import Finding, Level, above, finding

MAX_MERGED_GAPS = 0.01
"""Gaps inside one read, as a share of all gaps."""
MAX_READ_LATENESS = 0.5
"""Lateness of a read, as a share of the time between two reads."""
MIN_BURST_EVENTS, MIN_BURST_INTERVAL_S = 8, 0.25
"""A burst with more events and a longer interval than these is not caused by the steps of an engine."""


def _sent_rate(facts: Mapping[str, Any]) -> Finding | None:
    fraction = facts["sent_over_offered"]
    level = above(None if fraction is None else round(1 - fraction, 9), 0.01, 0.05)
    return finding("sent_rate", level, f"only {100 * (fraction or 0):.1f} % of the offered requests were sent on time")


def _schedule_lag(facts: Mapping[str, Any]) -> Finding | None:
    """The bound is 5 ms or 5 % of the median TTFT, whichever is larger; a smaller lag does not distort latencies."""
    lag, ttft = facts["schedule_lag_p99_s"], facts["ttft_median_s"] or 0.0
    level = above(lag, max(0.005, 0.05 * ttft), max(0.025, 0.20 * ttft))
    return finding("schedule_lag", level, f"the generator sent requests up to {(lag or 0) * 1e3:.1f} ms late (p99)")


def _full_reads(facts: Mapping[str, Any]) -> Finding | None:
    """Finds reads of a full receive buffer: a server that waits for such a buffer has correct arrival times.

    Linux 6.18 stops a sender at 110 KB of unread data, so a full buffer always leads to a read of 64 KiB. The TCP_INFO
    of the receiver does not show it: `tcpi_rcv_wnd` stays at 65,536.
    """
    count = facts.get("full_reads") or 0
    return finding(
        "receive_buffer",
        Level.VALID if count else None,
        f"{count:,} reads returned 64 KiB: so much data was unread that the server may have had to wait; give the "
        "generator more processor time or `--workers`",
    )


def _starved(facts: Mapping[str, Any]) -> Finding | None:
    """Finds late reads: the kernel merges unread segments, and the merged segments have a single arrival time.

    Events that the server itself merged are read in time. A read is late if its delay is more than half of the time
    between two reads of a stream.
    """
    late, interval = facts.get("read_late_p99_s"), facts.get("read_interval_s")
    merged = facts.get("coalesced_gaps_share") or 0.0
    is_late = late is not None and interval is not None and late > MAX_READ_LATENESS * interval
    return finding(
        "starved",
        Level.DEGRADED if is_late and merged > MAX_MERGED_GAPS else None,
        f"the generator was starved: {100 * merged:.1f} % of the gaps are inside one read and have no arrival time, "
        f"because reads were up to {(late or 0) * 1e3:.0f} ms late (p99); TTFT and gaps are bounds; give the "
        "generator more processor time or `--workers`",
    )


def _loop_lag(facts: Mapping[str, Any]) -> Finding | None:
    """Checked only without arrival times of the kernel, which a late read does not change."""
    if facts.get("arrival_times") == "kernel":
        return None
    lag, gap = facts["loop_lag_p99_s"], facts["gap_median_s"]
    fraction = lag / gap if lag is not None and gap else None
    return finding(
        "loop_lag",
        above(fraction, 0.25, 1.0),
        f"the generator's event loop lagged {(lag or 0) * 1e3:.1f} ms (p99), {100 * (fraction or 0):.0f} % of the "
        "median gap; reserve CPU cores for the generator",
    )


def _cpu(facts: Mapping[str, Any]) -> Finding | None:
    fraction = facts["cpu_share_max"]
    return finding(
        "cpu", above(fraction, 0.7, 0.9), f"a generator process used {100 * (fraction or 0):.0f} % of its CPU core"
    )


def _tokens(facts: Mapping[str, Any]) -> Finding | None:
    fraction = facts["token_mismatch_median"]
    level = above(fraction, 0.02, 0.10)
    return finding(
        "token_count", level, f"server and client token counts differ by {100 * (fraction or 0):.1f} % (median)"
    )


def _usage(facts: Mapping[str, Any]) -> Finding | None:
    """The server's count of an answer is below its events or above the limit of the request."""
    fraction = facts["usage_mismatch_median"]
    return finding(
        "token_count",
        above(fraction, 0.02, 0.10),
        f"usage reports impossible token counts: {100 * (fraction or 0):.1f} % (median) below the streamed events or "
        "above the requested limit",
    )


def _finish_reasons(facts: Mapping[str, Any]) -> Finding | None:
    missing, answers = facts["unfinished_answers"], facts["answers"]
    return finding(
        "finish_reason",
        above(missing / answers if answers else None, 0.0, 0.05),
        f"{missing} of {answers} answers ended without a finish reason: they may be cut off, but count as complete",
    )


def _bursts(facts: Mapping[str, Any]) -> Finding | None:
    """An engine may send a few tokens at once; many tokens at long intervals were held back on their way."""
    events, interval_s = facts["burst_events"], facts["burst_interval_s"]
    is_held = events is not None and events >= MIN_BURST_EVENTS and interval_s >= MIN_BURST_INTERVAL_S
    return finding(
        "bursts",
        Level.DEGRADED if is_held else None,
        f"tokens arrive in bursts of {events or 0:.0f} every {interval_s or 0:.2f} s: a proxy or a buffer holds them "
        "back, so TTFT and gaps are not those of the server; measure the server without it",
    )


def _prompt_lengths(facts: Mapping[str, Any]) -> Finding | None:
    excess, planned = facts["input_tokens_excess"], facts["planned_input_tokens"]
    fraction = abs(excess) / planned if excess is not None and planned else None
    return finding(
        "prompt_length",
        above(fraction, 0.05, math.inf),
        f"prompts have {abs(excess or 0):.0f} tokens {'more' if (excess or 0) > 0 else 'fewer'} than the planned "
        f"{planned or 0:.0f} (median, without a chat template); pass the model's tokenizer.json as --tokenizer",
    )


def _answer_lengths(facts: Mapping[str, Any]) -> Finding | None:
    share = facts["other_length_share"]
    return finding(
        "answer_length",
        above(share, 0.0, math.inf),
        f"{100 * (share or 0):.2g} % of the answers do not have the forced length: the server ended them early, or its "
        "context is too short; compare prompt and answer lengths with its context length",
    )


def _completions(facts: Mapping[str, Any]) -> Finding | None:
    """A window with few completions is valid: it has no intervals."""
    level = None if facts["completions"] else Level.INVALID
    remedy = "see the causes of the failed requests" if facts["only_errors"] else "run longer"
    return finding("completions", level, f"no request completed in the window; {remedy}")


def _cut_off(facts: Mapping[str, Any]) -> Finding | None:
    """The run stays valid: latencies of these requests are marked as lower bounds."""
    count, limit_s = facts.get("cut_off") or 0, facts.get("drain_limit_s")
    limit = "" if limit_s is None else f" of {limit_s:g} s"
    noun = "request was" if count == 1 else "requests were"
    message = f"{count} {noun} cut off at the drain limit{limit} and may have taken longer (≥); raise --drain"
    return finding("drain", Level.VALID if count else None, message)


def _request_counts(facts: Mapping[str, Any]) -> Finding | None:
    """A server may or may not count failures, so its count must be between the successes and all sent requests."""
    sent, succeeded, by_server = facts["requests"], facts["succeeded"], facts["server_requests"]
    if by_server is None or succeeded <= by_server <= sent:
        return None
    by_client = sent if by_server > sent else succeeded
    is_far = abs(by_client - by_server) > 0.01 * max(by_client, by_server)
    cause = "; another client used it" if by_server > sent else ""
    message = f"the client counted {by_client} requests and the server {by_server}{cause}"
    return Finding("request_count", Level.INVALID if is_far else Level.DEGRADED, message)


def _loop_gap(facts: Mapping[str, Any]) -> Finding | None:
    gap = facts["loop_lag_max_s"]
    return finding("loop_gap", above(gap, 1.0, 5.0), f"the generator's event loop was blocked for {gap or 0:.1f} s")


def _generator(facts: Mapping[str, Any]) -> Finding | None:
    counts = {"lost workers": "lost_workers", "client errors": "client_errors", "records not written": "write_errors"}
    broken = [f"{facts[name]} {title}" for title, name in counts.items() if facts[name]]
    broken += [
        f"worker {lost['worker']} with {100 * lost['share']:.0f} % of the load ({lost['because']})"
        for lost in facts.get("lost") or ()
    ]
    return Finding("generator", Level.INVALID, "the generator failed: " + ", ".join(broken)) if broken else None


def _capacity(facts: Mapping[str, Any]) -> Finding | None:
    rate, capacity = facts["events_per_s_per_worker"], facts["capacity_events_per_s"]
    level = Level.DEGRADED if rate and capacity and rate > 0.7 * capacity else None
    return finding(
        "capacity", level, f"{rate or 0:.0f} events/s per worker, more than 70 % of the capacity in the self-test"
    )


CHECKS: tuple[Callable[[Mapping[str, Any]], Finding | None], ...] = (
    _generator,
    _completions,
    _cut_off,
    _sent_rate,
    _schedule_lag,
    _full_reads,
    _starved,
    _loop_lag,
    _loop_gap,
    _cpu,
    _tokens,
    _usage,
    _finish_reasons,
    _bursts,
    _prompt_lengths,
    _answer_lengths,
    _request_counts,
    _capacity,
)
