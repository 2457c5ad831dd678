"""The acceptance and the cost of drafts, from traces made by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from reference_server.router.scheduling.step_work import StepWork
from tuner.errors import CostModelError
from tuner.simulator.drafting import Drafting, SpeculatingLaw
from tuner.simulator.fitting.cost_model import CostModel
from tuner.simulator.fitting.draft_acceptance import DraftAcceptance, fit_acceptance
from tuner.simulator.fitting.fit_steps import fit
from tuner.simulator.fitting.linear_law import LinearLaw
from tuner.simulator.fitting.traced_steps import TracedSteps, joined, read_steps

NOT_ADAPTIVE = {"settings": {"speculate_adaptive": {"value": False}}}
COLUMNS = ["kind", *StepWork._fields, "drafts_proposed", "drafts_accepted", "total_ns", "wall_ns"]


def decode(rows, proposed=(), accepted=(), kv=0, wall_ns=1.0):
    return ["decode", 0, 0, 0, 0, rows, kv, 0, list(proposed), list(accepted), wall_ns, wall_ns]


def traced(path, rows, facts=NOT_ADAPTIVE):
    lines = [{"format": 2, "columns": COLUMNS, "facts": facts}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_steps(path)


def test_a_first_token_and_one_after_an_accepted_one_are_distinguished(tmp_path):
    """Ten drafts of two tokens in 20 rows: six first tokens are accepted, and three of these drafts to their end."""
    steps = traced(tmp_path / "t", [decode(10, (6, 6), (4, 2)), decode(10, (4, 4), (2, 1))])

    found = fit_acceptance([steps])

    assert found is not None
    assert found.next == pytest.approx(3 / 6)
    # Three drafts continue an accepted one, and half of their first tokens are accepted: 4.5 of the other 7.
    assert found.first == pytest.approx(4.5 / 7)
    assert found.coverage == pytest.approx(7 / 17)
    assert steps.drafted.tolist() == [12, 8]


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [2, 4, 8])
def test_the_length_of_drafts_does_not_change_the_fit(tmp_path, speculate):
    """Drafts of a simulated server whose acceptance is known, counted by position as in a step trace."""
    truth = DraftAcceptance(0.3, 0.2, 0.9)
    drafting = Drafting(SpeculatingLaw(LinearLaw((0.0,) * 10), speculate, truth, is_adaptive=False))
    row, lines = drafting.row(7, 100, 10**9), []
    for _ in range(30_000):
        [length] = drafting.propose([row])
        count = drafting.accepted(row, length) if length else 0
        lines.append(decode(1, [1] * length, [int(place < count) for place in range(length)]))
        row.num_ids += 1 + count

    found = fit_acceptance([traced(tmp_path / "t", lines)])

    assert found is not None
    assert (found.coverage, found.first, found.next) == pytest.approx((0.3, 0.2, 0.9), rel=0.1)


def decoded(law, num_steps=4_000):
    """The trace rows of one request on a server with this law, with times that vary by 10 %, and its tokens per ns."""
    drafting, chance = Drafting(law), np.random.default_rng(law.speculate)
    row, lines, tokens, spent_ns = drafting.row(7, 100, 10**9), [], 0, 0.0
    for _ in range(num_steps):
        [length] = drafting.propose([row])
        count = drafting.accepted(row, length) if length else 0
        work = StepWork(rows=1, kv=row.num_ids)
        step_ns = law.drafted_step_ns(work, length) if length else law.step_ns(work)
        step_ns *= chance.normal(1.0, 0.1)
        places = [int(place < count) for place in range(length)]
        lines.append(decode(1, [1] * length, places, row.num_ids, step_ns))
        row.num_ids += 1 + count
        tokens, spent_ns = tokens + 1 + count, spent_ns + step_ns
    return lines, tokens / spent_ns


def test_the_speed_at_a_length_of_drafts_follows_from_launches_with_others(tmp_path):
    truth = SpeculatingLaw(
        LinearLaw((0.0,) * 5 + (4e5, 0.0, 0.0, 0.0, 10.0, 2e5, 4e4)), 4, DraftAcceptance(0.1, 0.06, 0.92), False
    )
    others = [
        traced(tmp_path / str(speculate), decoded(replace(truth, speculate=speculate))[0]) for speculate in (2, 8)
    ]

    cost = fit(others, with_intervals=False)

    assert cost.acceptance is not None
    predicted = SpeculatingLaw(cost.law, 4, cost.acceptance, False)
    assert decoded(predicted)[1] == pytest.approx(decoded(truth)[1], rel=0.05)


def test_an_adaptive_server_is_counted_only_in_steps_with_drafts(tmp_path):
    adaptive = traced(tmp_path / "a", [decode(4, (2, 2), (1, 0)), decode(100)], facts={})
    every = traced(tmp_path / "e", [decode(2, (1, 1), (0, 0)), decode(2)])

    assert fit_acceptance([adaptive]) == DraftAcceptance(0.5, 0.5, 0.0, is_adaptive=True)
    found = fit_acceptance([adaptive, every])
    assert found is not None
    assert (found.coverage, found.first, found.is_adaptive) == (0.25, 0.0, False)
    assert fit_acceptance([traced(tmp_path / "n", [decode(3)])]) is None


def test_launches_with_drafts_of_other_lengths_are_joined(tmp_path):
    short = traced(tmp_path / "s", [decode(1, (1,), (1,))])
    long = traced(tmp_path / "l", [decode(1, (1, 1), (1, 0)), decode(1)])
    plain = TracedSteps.of([[0, 0, 0, 0, 1, 5, 0]], [1.0])

    both = joined([short, long, plain])

    assert both.drafts is not None
    assert both.drafts.tolist() == [[[1, 0], [1, 0]], [[1, 1], [1, 0]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]


def test_the_cost_of_drafted_tokens_is_found(tmp_path):
    """Steps of 5 ms + 1 ms a row + 0.1 ms a key, 2 ms with drafts and 0.5 ms for each of their tokens."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(300):
        rows = int(rng.integers(1, 33))
        keys = rows * int(rng.integers(10, 100))
        drafted = int(rng.integers(0, 3)) * rows
        wall_ns = 5e6 + 1e6 * rows + 1e5 * keys * (1 + drafted / rows) + (2e6 + 5e5 * drafted if drafted else 0)
        proposed = (rows, drafted - rows) if drafted > rows else (drafted,) if drafted else ()
        lines.append(decode(rows, proposed, [0] * len(proposed), keys, wall_ns))

    model = fit([traced(tmp_path / "t", lines)], with_intervals=False)

    found = [model.coefficients[name] for name in ("decode", "rows", "kv", "drafts", "drafted")]
    assert found == pytest.approx([5e6, 1e6, 1e5, 2e6, 5e5], rel=0.01)
    assert CostModel.from_json(json.loads(json.dumps(model.to_json()))).acceptance == model.acceptance
    assert model.acceptance is not None


@pytest.mark.parametrize("row", [{}, {"coverage": 2, "first": 0.5, "next": 0.5}, {"coverage": 1, "first": 0.5}])
def test_an_acceptance_that_is_no_probability_is_refused(row):
    with pytest.raises(CostModelError, match="`acceptance`"):
        DraftAcceptance.from_json(row)
