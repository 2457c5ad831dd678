"""Fitting step times: known laws are recovered, and columns that the steps do not determine are named."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reference_server.router.scheduling.step_work import StepWork
from tuner.errors import CostModelError, TraceError
from tuner.simulator.fitting.cost_file import Costs, read_costs
from tuner.simulator.fitting.cost_model import CostModel
from tuner.simulator.fitting.fit_steps import fit, rescaled
from tuner.simulator.fitting.linear_law import LinearLaw
from tuner.simulator.fitting.traced_steps import TracedSteps, read_steps, without_first_of_shape

LAW = LinearLaw((9e6, 1e5, 6e4, 2.0, 0.0, 6e6, 2e5, 0.0, 0.0, 80.0))


def sweep(rng: np.random.Generator, noise: float, law: LinearLaw = LAW, *, thin: int = 1) -> TracedSteps:
    works = [StepWork(p, p * n, p * n * n) for p in (1, 2, 4, 8) for n in (64, 256, 1024)]
    works += [StepWork(rows=r, kv=r * n) for r in (1, 2, 4, 8, 16, 32, 48, 64) for n in (128, 512, 1500)]
    works = works[::thin]
    return TracedSteps.of(works, [law.step_ns(work) * rng.lognormal(0, noise) for work in works])


def relative_errors(model: CostModel, steps: TracedSteps) -> np.ndarray:
    predicted = np.asarray([model.law.step_ns(StepWork(*row)) for row in steps.work])
    return np.abs(predicted / steps.wall_ns - 1)


def test_simulation_V9_a_known_law_is_found_again_from_25_rows():
    rng = np.random.default_rng(9)
    rows = sweep(rng, 0.03)
    rows = rows.chosen(np.isin(np.arange(len(rows)), rng.permutation(len(rows))[:25]))

    model = fit([rows])

    assert len(rows) == 25
    assert relative_errors(model, sweep(rng, 0.0)).max() < 0.03 * 2
    assert np.median(relative_errors(model, sweep(rng, 0.0))) < 0.03


def test_simulation_V9_a_missing_column_is_named():
    works = [StepWork(rows=r, kv=r * 100) for r in (1, 2, 4, 8, 16, 32)]

    model = fit([TracedSteps.of(works, [LAW.step_ns(work) for work in works])])

    assert {"prefill", "tokens", "squares", "prompts", "cached", "kv", "no_graph"} <= set(model.unknown)
    assert {"decode", "rows"} <= set(model.coefficients)


def test_rows_are_padded_to_captured_sizes():
    law = LinearLaw((0.0,) * 5 + (1e6, 0.0, 1e5, 3e6, 0.0), (8, 16))

    assert [law.step_ns(StepWork(rows=rows)) / 1e6 for rows in (1, 8, 9, 17)] == [1.8, 1.8, 2.6, 4.0]


def test_a_model_is_rescaled_to_the_level_of_a_load():
    rng = np.random.default_rng(1)
    load = sweep(rng, 0.05, LinearLaw(tuple(1.3 * c for c in LAW.coefficients)))

    model = rescaled(fit([sweep(rng, 0.0)]), load)

    assert model.law.step_ns(StepWork(rows=8, kv=800)) == pytest.approx(
        1.3 * LAW.step_ns(StepWork(rows=8, kv=800)), rel=0.03
    )


def test_launches_give_intervals_and_held_out_shapes_give_errors():
    rng = np.random.default_rng(2)
    launches = [sweep(rng, 0.02) for _ in range(4)]

    model = fit(launches)

    low, high = model.intervals["tokens"]
    assert low < 6e4 < high
    assert model.errors is not None
    assert 0 < model.errors.median["decode"] < 0.04


def test_a_cost_file_reads_as_it_was_written(tmp_path: Path):
    model = fit([sweep(np.random.default_rng(3), 0.02)])
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(model.to_json()))

    assert read_costs(path) == Costs({"none": model})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a cost file"),
        ("[]", "not a cost model"),
        ("{}", "not a cost model"),
        ('{"coefficients_ns": {"token": 1}}', "`coefficients_ns` has `token`, but its columns are"),
        ('{"coefficients_ns": {"tokens": -1}}', "not negative"),
    ],
)
def test_a_wrong_cost_file_is_refused(tmp_path: Path, text: str, words: str):
    path = tmp_path / "cost.json"
    path.write_text(text)

    with pytest.raises(CostModelError, match=words):
        read_costs(path)


def test_a_truncated_trace_is_read_up_to_its_last_complete_line(tmp_path: Path):
    path = tmp_path / "steps.jsonl"
    columns = ["kind", *StepWork._fields, "total_ns", "wall_ns"]
    head = json.dumps({"format": 2, "columns": columns, "facts": {"model_id": "m"}})
    rows = [["decode", 0, 0, 0, 0, 2, 100, 1, 5, 10]]
    path.write_text(head + "\n" + "\n".join(map(json.dumps, rows)) + '\n["decode", 0')

    steps = read_steps(path)

    assert (len(steps), steps.work[0].tolist(), steps.wall_ns.tolist()) == (1, [0, 0, 0, 0, 2, 100, 1], [10])


def test_a_file_without_a_step_trace_is_refused(tmp_path: Path):
    (tmp_path / "steps").write_text("hello")

    with pytest.raises(TraceError, match="not a step trace"):
        read_steps(tmp_path / "steps")


def test_the_first_step_of_a_shape_is_left_out():
    steps = TracedSteps.of([StepWork(rows=4, kv=10), StepWork(rows=4, kv=14), StepWork(rows=9, kv=10)], [9, 1, 9])

    assert without_first_of_shape(steps).wall_ns.tolist() == [1]


def traced_load(rng: np.random.Generator, law: LinearLaw) -> TracedSteps:
    """Steps of 16 closed-loop users: most are decode steps of 16 rows; after a wave of ends, fewer rows decode."""
    works = []
    for _ in range(40):
        works += [StepWork(rows=16, kv=16 * (700 + step)) for step in range(20)]
        for ended in rng.integers(1, 4, 4):
            rows, length = 16 - int(ended), int(rng.integers(512, 1024))
            works.append(StepWork(rows=rows, kv=rows * 700, ended=int(ended)))
            works.append(StepWork(1, length, length**2, 0, rows, rows * 700))
    return TracedSteps.of(works, [law.step_ns(work) * rng.lognormal(0, 0.03) for work in works])


def test_the_cost_of_ended_requests_is_found_and_a_law_without_it_is_refused():
    truth = LinearLaw((5e6, 0.0, 4e4, 10.0, 0.0, 2e6, 5e4, 0.0, 0.0, 80.0, 0.0, 0.0, 0.0, 0.0, 2e6))
    steps = traced_load(np.random.default_rng(5), truth)
    work = steps.work.copy()
    work[:, StepWork._fields.index("ended")] = 0

    model, blind = fit([steps]), fit([replace(steps, work=work)])

    assert model.coefficients["ended"] == pytest.approx(2e6, rel=0.05)
    assert Costs({"none": model}).problem is None
    assert model.law.step_ns(StepWork(rows=16, kv=16 * 710)) == pytest.approx(
        truth.step_ns(StepWork(rows=16, kv=16 * 710)), rel=0.02
    )
    assert "held-out decode" in (Costs({"none": blind}).problem or "")


def test_costs_without_a_term_for_ended_requests_are_read(tmp_path: Path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"coefficients_ns": {"decode": 5e6, "rows": 1e6}}))

    law = read_costs(path).models["none"].law

    assert law.step_ns(StepWork(rows=2, kv=10, ended=3)) == 7e6
