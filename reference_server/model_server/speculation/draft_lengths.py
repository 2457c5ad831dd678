"""Chooses how many tokens of each draft a step verifies, for the most expected tokens per ns."""

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from reference_server.model_server.speculation.step_cost import StepCost

MIN_GAIN = 1.1
"""Drafts are verified if their expected speed, divided by that of a plain step, is above this. It is above 1 because
estimates are not exact."""
MIN_GAIN_AT_BEST = 1.3
"""The same for a batch with the best possible drafts. It is higher because most drafts are worse and the search for
drafts takes time."""
BEST_RATE = 0.9
"""The acceptance of the best possible drafts, when only the batch is known."""


class DraftCandidate(NamedTuple):
    """One row of a step and its draft: the probability that each token is accepted if all tokens before it are.

    num_keys: tokens that the row attends to. is_sampled: its tokens are not chosen greedily.
    """

    rates: Sequence[float]
    num_keys: int = 0
    is_sampled: bool = False


def draft_lengths(
    candidates: Sequence[DraftCandidate],
    cost: StepCost,
    proposing_ns: float = 0.0,
    min_gain: float = MIN_GAIN,
    spent_ns: float = 0.0,
) -> list[int]:
    """The tokens to verify of each candidate's draft; all 0 if no choice is expected to save time.

    The gains of a draft's tokens fall with each place, and taking the largest gains first is the best choice for every
    number of rows. proposing_ns: the time to propose these drafts, if only a step with drafts has it. spent_ns: the
    time that was already spent to propose them. A step without drafts has this time too, so it raises the time per
    token of both, and a further row may cost more.
    """
    gains = [
        (gain, row) for row, candidate in enumerate(candidates) for gain in accumulate(candidate.rates, operator.mul)
    ]
    gains.sort(reverse=True)
    num_rows = len(candidates)
    row_ns = [each.num_keys * cost.key_ns + each.is_sampled * cost.sampled_row_ns for each in candidates]
    extra_ns = sum(row_ns) + spent_ns
    tokens, best_count = float(num_rows), 0
    best = min_gain * num_rows / (cost.plain_ns(num_rows) + extra_ns)
    extra_ns += cost.drafts_ns + proposing_ns
    for count, ((gain, row), rows_ns) in enumerate(zip(gains, cost.rows_ns[num_rows:], strict=False), 1):
        tokens += gain
        extra_ns += cost.draft_row_ns + row_ns[row]
        speed = tokens / (rows_ns + extra_ns)
        if speed > best:
            best, best_count = speed, count
    lengths = [0] * num_rows
    for _, row in gains[:best_count]:
        lengths[row] += 1
    return lengths


def token_ns(candidates: Sequence[DraftCandidate], cost: StepCost) -> float:
    """The time of one token of a step without drafts, with its keys and its sampling."""
    num_keys = sum(each.num_keys for each in candidates)
    num_sampled = sum(each.is_sampled for each in candidates)
    row_ns = num_keys * cost.key_ns + num_sampled * cost.sampled_row_ns
    return (cost.plain_ns(len(candidates)) + row_ns) / len(candidates)


def added_ns(candidates: Sequence[DraftCandidate], lengths: Sequence[int], cost: StepCost) -> float:
    """The additional time of a step that verifies drafts of these lengths; 0 without any."""
    if not any(lengths):
        return 0.0
    drafted = list(zip(candidates, lengths, strict=True))
    num_keys = sum(length * each.num_keys for each, length in drafted)
    num_sampled = sum(length * each.is_sampled for each, length in drafted)
    return cost.added_ns(len(candidates), sum(lengths), num_keys, num_sampled)


def expected_tokens(rates: Sequence[float]) -> float:
    """The mean number of accepted tokens of a draft.

    >>> expected_tokens([0.5, 0.5])
    0.75
    """
    return float(sum(accumulate(rates, operator.mul)))


def can_pay(num_rows: int, speculate: int, cost: StepCost) -> bool:
    """Whether good drafts would make a batch of this many rows faster, so that a search for them can save time.

    One good draft is enough: the others of the batch may have none.
    """
    best = DraftCandidate((BEST_RATE,) * speculate)
    alone = [best, *[DraftCandidate(())] * (num_rows - 1)]
    return any(draft_lengths(alone, cost, cost.proposing_ns(1), MIN_GAIN_AT_BEST)) or any(
        draft_lengths([best] * num_rows, cost, cost.proposing_ns(num_rows), MIN_GAIN_AT_BEST)
    )
