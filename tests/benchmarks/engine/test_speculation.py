"""The benchmark of drafts measures where it knows least, with one engine for all arms."""

import json
from pathlib import Path
from threading import Event

import pytest

from benchmarks.engine.in_process import machine
from benchmarks.engine.speculation import (
    FEWEST_ROUNDS,
    Plan,
    arms_of,
    compare,
    differing_share,
    interval,
    next_cell,
    other_machine,
    table,
    write,
)
from benchmarks.engine.speculation_engine import AGAIN, PLAIN, Arm, MeasuredDrafts, SwitchedEngine
from benchmarks.engine.speculation_texts import prompts

COPY, FREE = ("copy", 1), ("free", 1)


def measured(cell: tuple[str, int], spread: float) -> list[MeasuredDrafts]:
    """Without drafts, and with drafts whose ratios differ by `spread`."""
    plain, drafted = (MeasuredDrafts("m", *cell, name) for name in ("no drafts", "N=4 adaptive"))
    plain.tokens_per_cpu_s = [100.0] * 40
    drafted.tokens_per_cpu_s = [100.0 + spread * (number % 2) for number in range(40)]
    plain.tokens_per_s, drafted.tokens_per_s = plain.tokens_per_cpu_s, drafted.tokens_per_cpu_s
    return [plain, drafted]


def test_the_interval_of_the_median_holds_the_middle_of_the_values() -> None:
    assert interval([float(value) for value in range(1, 101)]) == (41.0, 60.0)
    assert interval([2.0]) == (2.0, 2.0)


def test_every_cell_has_some_rounds_before_intervals_count() -> None:
    cells = {COPY: measured(COPY, 50.0), FREE: measured(FREE, 0.0)}

    assert next_cell(cells, {COPY: 40, FREE: FEWEST_ROUNDS}, 0.01) == FREE
    assert next_cell(cells, {COPY: 41, FREE: FEWEST_ROUNDS + 1}, 0.01) == COPY


def test_half_of_the_further_rounds_are_for_the_cell_with_the_fewest() -> None:
    cells = {COPY: measured(COPY, 50.0), FREE: measured(FREE, 0.0)}
    rounds = {COPY: 20, FREE: 20}

    for _ in range(20):
        cell = next_cell(cells, rounds, 0.01)
        assert cell is not None
        rounds[cell] += 1

    assert rounds == {COPY: 30, FREE: 30}


def test_it_ends_when_all_intervals_are_narrow() -> None:
    cells = {COPY: measured(COPY, 0.5), FREE: measured(FREE, 0.0)}

    assert next_cell(cells, {COPY: 40, FREE: 40}, 0.01) is None


def test_a_file_keeps_the_cells_of_earlier_runs_on_a_like_machine(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    write(file, [*measured(COPY, 1.0), *measured(FREE, 1.0)])
    write(file, measured(COPY, 5.0))

    stored = json.loads(file.read_text())
    assert [(each["text"], each["arm"], max(each["tokens_per_cpu_s"])) for each in stored["measured"]] == [
        ("free", "no drafts", 100.0),
        ("free", "N=4 adaptive", 101.0),
        ("copy", "no drafts", 100.0),
        ("copy", "N=4 adaptive", 105.0),
    ]
    assert other_machine(file) is None
    assert machine() in file.read_text()
    file.write_text(json.dumps(stored | {"machine": "another"}))
    assert other_machine(file) == "another"


def test_requests_whose_ids_differ_are_counted_without_those_of_plain_decoding() -> None:
    plain, drafted = measured(COPY, 1.0)
    plain.requests = drafted.requests = 40
    drafted.differing = 2

    assert differing_share([plain, drafted]) == 0.05
    assert "2 of 40 requests differ" in table([plain, drafted])


class AfterRounds(Event):
    """It is set after so many rounds."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._left = rounds

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


async def test_an_interrupted_run_returns_the_cells_measured_so_far() -> None:
    plan = Plan(["copy", "free"], [1], minutes=1.0, narrow=0.01, interrupted=AfterRounds(3))

    found = await compare("preset:tiny-llama", [PLAIN, Arm(2)], plan)

    assert [(each.text, each.arm, len(each.tokens_per_s)) for each in found] == [
        ("copy", "no drafts", 1),
        ("copy", "N=2 adaptive", 1),
    ]
    assert [each.requests for each in found] == [2, 2]
    assert "preset:tiny-llama (drafts from n-grams)" in table(found)


@pytest.mark.slow
async def test_one_engine_decodes_with_and_without_drafts_in_turn() -> None:
    model = "preset:tiny-llama-medusa"
    arms = arms_of(model, speculate=[2, 5], fixed=[4])
    assert arms == [PLAIN, AGAIN, Arm(2), Arm(4, is_adaptive=False)]
    engine = await SwitchedEngine.load(model, 4)
    whole = list(prompts("copy", 2, seed=1))
    requests = await engine.with_prompts(whole)
    measured = [MeasuredDrafts(model, "copy", 2, arm.name) for arm in arms]

    ids = [await engine.run(engine.drafter(arm), requests, found) for arm, found in zip(arms, measured, strict=True)]
    computed_again = await engine.run(None, whole, None)
    engine.close()

    # All whole blocks before the last token: the prompts have 64 tokens and 47.
    assert [request.cache_len for request in requests] == [48, 32]
    assert all(each == computed_again for each in ids)
    assert [found.tokens > found.steps for found in measured[:2]] == [False, False]
    assert measured[3].tokens > measured[3].steps
    assert sum(measured[0].proposed) == sum(measured[1].proposed) == 0
    assert measured[2].proposed[2] == 0
    assert "no drafts again" in table(measured)
    assert engine.source == "heads alone"
