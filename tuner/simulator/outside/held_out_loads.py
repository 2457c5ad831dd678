"""Loads that were not used in a calibration. Each is predicted before it is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loadgen import runner
from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.progress import ProgressDisplay
from loadgen.target.target import Target
from reports.metrics.summary import metric_value, summarize
from tuner.simulator.fitting.cost_file import Costs
from tuner.simulator.load import load_of
from tuner.simulator.predict import predict
from tuner.simulator.validate import NAMES, PredictedLaunch

# Requests of each user and in total of a closed loop, and duration of an open loop in seconds.
ROUNDS, FEWEST_REQUESTS, OPEN_LOOP_S = 5, 40, 10
# Rates of the open loops, as fractions of the predicted closed-loop throughput.
OPEN_FRACTIONS = (0.4, 0.7)


@dataclass(frozen=True, slots=True)
class HeldOutLoad:
    """A named load with its config."""

    name: str
    config: BenchConfig


def held_out_loads(costs: Costs, base: BenchConfig, most_users: int, most_tokens: int) -> list[HeldOutLoad]:
    """Closed loops and open loops with other numbers of users and other lengths than the calibration."""
    long_tokens, answers = most_tokens // 2, max(8, most_tokens // 8)
    lengths = (
        {"input_tokens": f"uniform:24,{long_tokens}", "output_tokens": f"uniform:8,{answers}"},
        {"input_tokens": f"{most_tokens // 5}", "output_tokens": f"{most_tokens // 10}"},
    )
    users = sorted({1, *(count for count in (3, 6, 12, 24, 48) if count < most_users), most_users})
    found = []
    for number, count in enumerate(users):
        values = {"concurrency": count, "requests": max(FEWEST_REQUESTS, ROUNDS * count), **lengths[number % 2]}
        found.append(HeldOutLoad(f"closed-{count}", _config(base, values)))
    most = predicted_load(costs, found[-1].config, ("requests_per_s",))["requests_per_s"]
    for fraction in OPEN_FRACTIONS:
        rate = round(fraction * most, 3)
        values = {"mode": "poisson", "rate": rate, "duration": OPEN_LOOP_S, **lengths[(len(users) - 1) % 2]}
        found.append(HeldOutLoad(f"poisson-{rate:g}", _config(base, values)))
    return found


def _config(base: BenchConfig, values: Mapping[str, object]) -> BenchConfig:
    common = {"workload": "synthetic", "length_control": "forced", "prefix_cache": "cold", "warmup": 0.0}
    return parsing.load(BenchConfig, {**base.model_dump(exclude_unset=True), **common, **values})


def predicted_load(costs: Costs, config: BenchConfig, names: Sequence[str] = NAMES) -> dict[str, float]:
    """The metrics of a load on the server of a cost file."""
    server = costs.reference.for_load(config)
    with_ids = server.uses_prefix_caching
    return predict(server, costs.of(server.settings), load_of(config, with_ids=with_ids, client=costs.client), names)


def measure_held_out(
    costs: Costs,
    loads: Sequence[HeldOutLoad],
    target: Target,
    folder: Path,
    repeats: int,
    progress: ProgressDisplay,
) -> list[PredictedLaunch]:
    """Predict every load, and then measure all of them `repeats` times. Returns medians over the repeats.

    The runs of a load are apart in time, so that a slow minute of the machine is in one run of each.
    """
    predicted: dict[str, list[Mapping[str, float]]] = {}
    measured: dict[str, list[Mapping[str, float]]] = {}
    order = [(load, repeat) for repeat in range(repeats) for load in loads]
    configs = {
        (load.name, repeat): load.config.model_copy(update={"seed": load.config.seed + repeat})
        for load, repeat in order
    }
    for load, repeat in order:
        predicted.setdefault(load.name, []).append(predicted_load(costs, configs[load.name, repeat]))
    for number, (load, repeat) in enumerate(order, start=1):
        progress.show(f"run {number} of {len(order)}: {load.name}")
        config = configs[load.name, repeat]
        summary = summarize(runner.measure(config, target, folder / f"{load.name}-{repeat}"))
        values = {name: metric_value(summary, name, config.is_open_loop) or 0.0 for name in NAMES}
        measured.setdefault(load.name, []).append(values)
    found = [
        PredictedLaunch({"load": load.name}, _medians(measured[load.name]), _medians(predicted[load.name]), number)
        for number, load in enumerate(loads)
    ]
    return [
        launch
        for launch in found
        if all(value > 0 for each in (launch.measured, launch.predicted) for value in each.values())
    ]


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(row.get(name, 0.0) for row in rows) for name in NAMES}
