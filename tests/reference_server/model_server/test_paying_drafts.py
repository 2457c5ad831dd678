"""The adaptive rule against a server whose step times and acceptance are known: near plain decoding or faster.

The warm-up's cost is wrong by `factor`, and knows nothing of the time between steps. 26 cases.
"""

import random

import pytest

from reference_server.model_server.draft_heads.source import PRIORS
from reference_server.model_server.speculation.ngram import NGRAM_PRIORS
from reference_server.model_server.speculation.step_cost import StepCost, by_rows
from reference_server.presets.catalog import find
from reference_server.tokenizer import Tokenizer, load_tokenizer
from tests.support.models.virtual_drafting import KnownText, VirtualServer

ROWS_US = {1: 255, 2: 255, 3: 264, 5: 303, 8: 343, 16: 480, 32: 1070, 64: 2229, 128: 4300}
ROWS_NS = by_rows({rows: 1e3 * us for rows, us in ROWS_US.items()}, 128)
HEADS = StepCost(ROWS_NS, drafts_ns=143e3, proposal_ns=tuple(150e3 + 48e3 * rows for rows in range(1, 129)))
NGRAMS = StepCost(ROWS_NS, drafts_ns=143e3, proposal_ns=tuple(5e3 * rows for rows in range(1, 129)))
BETWEEN_NS = 150e3
STEPS = 2500

COPIED_BY_HEADS = KnownText((0.1, 0.4, 0.6, 0.85, 0.97), (0.1, 0.15, 0.2, 0.25, 0.3))
FREE_BY_HEADS = KnownText((0.1, 0.35, 0.55, 0.75, 0.9), (0.25, 0.25, 0.2, 0.15, 0.15))
POOR_BY_HEADS = KnownText((0.1, 0.3, 0.45, 0.5, 0.6), (0.4, 0.3, 0.2, 0.05, 0.05))
COPIED = KnownText((0, 0, 0.6, 0.7, 0.93), (0, 0, 0.2, 0.2, 0.6), coverage=0.5)
FREE = KnownText((0, 0, 0.1, 0.15, 0.2), (0, 0, 0.6, 0.2, 0.2), coverage=0.2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    preset = find("preset:tiny-llama")
    assert preset is not None
    return load_tokenizer(preset.tokenizer_directory, 4096)


def speed(
    tokenizer: Tokenizer, text: KnownText, cost: StepCost, num_rows: int, factor: float, adaptive: bool = True
) -> float:
    """Tokens per second as a ratio to those without drafts."""

    def plain_ns(rows: int) -> float:
        return cost.plain_ns(rows) + BETWEEN_NS

    def step_ns(rows: int, drafted: int, looks: int) -> float:
        added_ns = cost.added_ns(rows, drafted) if drafted else 0.0
        return plain_ns(rows) + factor * (cost.proposing_ns(looks) + added_ns)

    priors = PRIORS if cost is HEADS else NGRAM_PRIORS
    server = VirtualServer(
        text, num_rows, step_ns, tokenizer, cost=cost if adaptive else None, priors=priors, noise=jitter
    )
    return server.tokens_per_s(STEPS) / (1e9 * num_rows / plain_ns(num_rows))


def jitter(chance: random.Random, _now_ns: float) -> float:
    """One step in ten takes twice as long."""
    return 1.9 if chance.random() < 0.1 else 0.9


@pytest.mark.parametrize("factor", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize(
    ("text", "cost"), [(FREE_BY_HEADS, HEADS), (POOR_BY_HEADS, HEADS), (FREE, NGRAMS), (COPIED, NGRAMS)]
)
def test_drafts_never_slow_decoding_down_by_more_than_three_percent(
    tokenizer: Tokenizer, text: KnownText, cost: StepCost, num_rows: int, factor: float
) -> None:
    assert speed(tokenizer, text, cost, num_rows, factor) > 0.97


@pytest.mark.parametrize(("text", "cost", "factor"), [(COPIED_BY_HEADS, HEADS, 1.0), (COPIED, NGRAMS, 2.0)])
def test_where_drafts_of_a_fixed_length_pay_so_do_adaptive_ones(
    tokenizer: Tokenizer, text: KnownText, cost: StepCost, factor: float
) -> None:
    fixed = speed(tokenizer, text, cost, 1, factor, adaptive=False)

    assert fixed > 1.4
    assert speed(tokenizer, text, cost, 1, factor) > 0.85 * fixed
