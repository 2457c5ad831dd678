"""LoRA adapters in the simulator: a known cost is found from steps, and a load is predicted with it."""

import json
from pathlib import Path

import numpy as np
import pytest

from loadgen.config.bench_config import BenchConfig
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.scheduling.step_work import StepWork
from tuner.errors import NotSimulatedError
from tuner.simulator.fitting.cost_model import CostModel
from tuner.simulator.fitting.fit_steps import fit, rescaled
from tuner.simulator.fitting.linear_law import COLUMNS, LinearLaw
from tuner.simulator.fitting.traced_steps import read_steps
from tuner.simulator.load import load_of
from tuner.simulator.predict import predict
from tuner.simulator.simulated_server import SimulatedServer
from tuner.simulator.simulation import PlannedRequest, Simulated, SimulatedLoad, Simulation
from tuner.simulator.slot_replica import SlotRule

MS = 1_000_000
# Prefill 10 ms + 0.1 ms per token; decode 5 ms + 1 ms per row; 0.5 ms per adapter + 0.01 ms per token that uses one.
TRUTH = LinearLaw((10e6, 0.0, 1e5, 0.0, 0.0, 5e6, 1e6, 0.0, 0.0, 0.0, 0.0, 0.0, 5e5, 1e4))
PLAIN = LinearLaw(TRUTH.coefficients[:12])


def replay(*planned: PlannedRequest, law: LinearLaw = TRUTH, strides: bool = True, **changes: object) -> Simulated:
    options = SchedulerOptions(1000, 200_001, 1.2, 20, **{"block_size": 1, **changes})  # type: ignore[arg-type]
    load = SimulatedLoad(planned, times_ns=[0] * len(planned))
    return Simulation(load, [(options, law)], with_strides=strides, with_gaps=True).run()


def zipf_load(names: int) -> BenchConfig:
    adapters = ",".join(f"a{number}" for number in range(names))
    return BenchConfig.model_validate({
        "adapters": adapters, "adapter_zipf": 1.0, "concurrency": 12, "duration": "60s", "warmup": "0s",
        "input_tokens": "uniform:32,96", "output_tokens": "uniform:16,48",
    })  # fmt: skip


def test_a_step_costs_its_adapters_and_their_tokens():
    rows = [PlannedRequest(100, 3, adapter="a"), PlannedRequest(100, 3, adapter="a"), PlannedRequest(100, 3)]

    run = replay(*rows, PlannedRequest(100, 3, adapter="b"))

    # Prefill of 400 tokens, 300 of them with one of two adapters; then two steps of four rows.
    first, step = 10 + 40 + 2 * 0.5 + 300 * 0.01, 5 + 4 + 2 * 0.5 + 3 * 0.01
    assert run.flights[0].token_ns == [round(each * MS) for each in (first, first + step, first + 2 * step)]


def test_strides_and_single_steps_agree():
    rows = [PlannedRequest(20 + n, 5 + 3 * (n % 40), adapter=(None, "a", "b")[n % 3]) for n in range(60)]

    ends = [[flight.end_ns for flight in replay(*rows, strides=each).flights] for each in (True, False)]

    assert ends[0] == pytest.approx(ends[1], abs=1000)


def test_a_chunked_step_counts_the_tokens_of_its_chunks():
    lengths = ((1500, 2), (10, 4))
    adapted = [PlannedRequest(*each, adapter=name) for each, name in zip(lengths, "ab", strict=True)]

    runs = [replay(*rows, supports_chunking=True) for rows in (adapted, [PlannedRequest(*each) for each in lengths])]

    more_ns = runs[0].flights[0].first_ns - runs[1].flights[0].first_ns
    # Two steps for the prompt of 1500 tokens; the other request is in both or in the second one.
    assert 2 * 0.5 * MS + 1500 * 0.01 * MS < more_ns <= 4 * 0.5 * MS + 1520 * 0.01 * MS


def test_cached_prefixes_belong_to_one_adapter():
    config = zipf_load(4).model_copy(update={"workload": "shared_prefix", "prefix_tokens": 64, "prefix_groups": 1})

    planned = [each for each, _ in zip(load_of(config, with_ids=True).planned, range(200), strict=False)]

    firsts = {(each.adapter, each.ids[0]) for each in planned if each.ids}
    assert len({adapter for adapter, _ in firsts}) == len(firsts) == 4


def test_a_known_cost_of_adapters_is_found_from_a_trace_and_predicts_a_zipf_load(tmp_path: Path):
    """Steps of a server with TRUTH and 2 % noise, without a single step of the load itself."""
    rng = np.random.default_rng(4)
    columns = ["kind", *StepWork._fields, "adapters", "adapted_tokens", "total_ns", "wall_ns"]
    rows = [
        (StepWork(count, count * tokens, count * tokens * tokens), adapters, count * tokens * (adapters > 0))
        for count in (1, 2, 4, 8)
        for tokens in (16, 64, 256)
        for adapters in (0, 1, min(4, count))
    ]
    rows += [
        (StepWork(rows=count, kv=count * 100), adapters, count * (adapters > 0))
        for count in (1, 2, 4, 8, 12, 16)
        for adapters in (0, 1, 2, 4, 8, 16)
        if adapters <= count
    ]
    lines = [{"format": 2, "columns": columns, "facts": {}}]
    for work, adapters, tokens in rows * 3:
        wall_ns = (TRUTH.step_ns(work) + TRUTH.adapters_ns(adapters, tokens)) * rng.lognormal(0, 0.02)
        lines.append(["step", *work, adapters, tokens, wall_ns, wall_ns])  # type: ignore[arg-type]
    trace = tmp_path / "steps.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))

    steps = read_steps(trace)
    model = rescaled(fit([steps]), steps)

    assert model.coefficients["adapters"] == pytest.approx(5e5, rel=0.15)
    assert model.coefficients["adapted"] == pytest.approx(1e4, rel=0.3)
    assert CostModel.from_json(json.loads(json.dumps(model.to_json()))) == model
    truth = CostModel(dict(zip(COLUMNS, TRUTH.coefficients, strict=False)))
    server = SimulatedServer({"max_batch_prefill_tokens": 1000, "max_batch_total_tokens": 20_000}, {})
    names = ("output_tokens_per_s", "tpot_mean_ms", "ttft_mean_ms")
    found, expected = (predict(server, each, load_of(zipf_load(16)), names) for each in (model, truth))
    base_load = load_of(zipf_load(16).model_copy(update={"adapters": None, "adapter_zipf": None}))
    plain = predict(server, CostModel(dict(zip(COLUMNS, PLAIN.coefficients, strict=False))), base_load, names)
    assert found == pytest.approx(expected, rel=0.02)
    assert expected[names[0]] < 0.9 * plain[names[0]]


def test_a_load_with_adapters_needs_their_cost():
    planned = (PlannedRequest(10, 2, adapter="a"),)

    with pytest.raises(NotSimulatedError, match="calibrate a server with `--lora-adapters`"):
        replay(*planned, law=PLAIN)
    with pytest.raises(NotSimulatedError, match="is not known from client timings"):
        Simulation(SimulatedLoad(planned, times_ns=[0]), [(SlotRule(2), TRUTH)]).run()


def test_other_adapters_than_those_of_the_measured_server_are_not_simulated():
    server = SimulatedServer({"max_batch_prefill_tokens": 1, "max_batch_total_tokens": 1}, {"lora_adapters": ["a=/a"]})

    for same in (["a=/a"], "a=/a"):
        assert server.with_settings({"lora_adapters": same}).settings["lora_adapters"] == same
    with pytest.raises(NotSimulatedError, match="`lora_adapters` is not simulated"):
        server.with_settings({"lora_adapters": ["b=/b"]})
